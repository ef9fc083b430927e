"""`serinus serve --node-rank N`: the ranks of another machine's engine that live here. No HTTP: machine 0 answers.

The ranks report to the leader themselves. This process starts them, passes SIGTERM on, ends when they have ended, and
ends them when the leader is gone: one that stands still cannot do it itself.
"""

from __future__ import annotations

import asyncio
import signal

from serinus.cli.processes import connection_lost, stop_process
from serinus.core.config import ServeConfig
from serinus.core.log import get_logger
from serinus.core.private_folder import PrivateFolder
from serinus.ranks.exit_reason import LOST_CODE, exit_words
from serinus.ranks.handshake import hello_of
from serinus.ranks.links import WATCHER
from serinus.ranks.rank_processes import mesh_of, rank_env, rank_words

_log = get_logger("cli")
_OTHERS_S = 3.0
"""After one rank has ended, or the leader, the others have this long: they hear it from their leader, or miss it."""


def run_node(config: ServeConfig) -> int:
    """Run the ranks of this machine to their end. Exit code 0, 2 wrong settings, 3 the engine ended."""
    return asyncio.run(_live(config))


async def _live(config: ServeConfig) -> int:
    parallel, mesh = config.parallel, mesh_of(config)
    names = {rank: mesh.name(rank) for rank in parallel.local_ranks}
    _log.info(
        "serinus: %s of %s as machine %d of %d, leader at %s",
        ", ".join(names.values()), config.model.model_path, parallel.node_rank, parallel.nnodes,
        parallel.dist_init_addr,
    )  # fmt: skip
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    with PrivateFolder() as home:
        file = home / "config.json"
        file.touch(0o600)
        file.write_text(config.to_json())
        ranks = {
            rank: await asyncio.create_subprocess_exec(
                *rank_words(file, rank, f"tcp://{parallel.dist_init_addr}"),
                env=rank_env(config),
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,
            )
            for rank in names
        }
        ends = {asyncio.create_task(process.wait()): rank for rank, process in ranks.items()}
        stop = asyncio.create_task(told.wait())
        address, silence_s = f"tcp://{parallel.dist_init_addr}", parallel.silence_s_max
        alone = asyncio.create_task(connection_lost(address, silence_s, hello_of(config, WATCHER)))
        done, _ = await asyncio.wait({*ends, stop, alone}, return_when=asyncio.FIRST_COMPLETED)
        for task, rank in ends.items():
            if task in done and (code := ranks[rank].returncode):
                _log.error("serinus: rank %s %s", names[rank], exit_words(code))
        if stop not in done:
            await asyncio.wait(ends, timeout=_OTHERS_S)
            if late := [names[rank] for rank, process in ranks.items() if process.returncode is None]:
                _log.error("serinus: %s did not end with the engine, killed", ", ".join(late))
        stop.cancel()
        alone.cancel()
        s_max = _OTHERS_S if told.is_set() else 0.0
        codes = await asyncio.gather(*(stop_process(process, s_max=s_max) for process in ranks.values()))
    if told.is_set():
        return 0
    return next((2 for code in codes if code == 2), LOST_CODE if any(codes) else 0)

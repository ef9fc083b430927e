"""RankProcesses: the other ranks of an engine, as its leader starts, finds and ends them.

    processes = RankProcesses(config, clock)   # ranks of this machine are started, and import what they need
    comm = processes.join()                    # all have reported; tensors can travel
    line = LeaderLine(..., processes.links)

On one machine everything is in a private directory and on loopback; with `--nnodes` ranks of other machines report at
`--dist-init-addr` and are told there where tensors meet. Knows nothing of what ranks do.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serinus.core.addresses import host_port, split_host_port, tcp_url
from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.cores import engine_threads, threads_env
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.private_folder import PrivateFolder
from serinus.parallel import Mesh
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, EngineExit, ExitRecord
from serinus.ranks.handshake import shared_settings
from serinus.ranks.leader_supervisor import LeaderSupervisor
from serinus.ranks.links import LeaderLinks, RankFacts
from serinus.wire.messages import RankWelcome

if TYPE_CHECKING:
    from serinus.parallel.comm import Comm

_VERDICT_S: Final = 3.0
"""The supervisor knows within this time whose end it was that broke a line (not, that a process stands still)."""


def mesh_of(config: ServeConfig) -> Mesh:
    """The ranks of an engine of these settings."""
    return Mesh(tp=config.parallel.tp_size, pp=config.parallel.pp_size, ep=config.parallel.ep_size)


def rank_words(config_file: Path, rank: int, leader: str) -> list[str]:
    """The command that runs a rank which ends with this process."""
    words = ["-m", "serinus.ranks.process", "--config", str(config_file), "--rank", str(rank), "--leader", leader]
    return [sys.executable, *words, "--parent", str(os.getpid())]


def rank_env(config: ServeConfig) -> dict[str, str]:
    """The environment of a rank of this machine: its share of the cores, and libraries that leave words to us."""
    threads = engine_threads(config.kernels.threads, len(config.parallel.local_ranks))
    return {"TORCH_CPP_LOG_LEVEL": "ERROR", **threads_env(threads)}


class RankProcesses:
    """The other ranks of one engine. All methods are for the loop's thread."""

    def __init__(self, config: ServeConfig, clock: Clock, exit_record: ExitRecord | None = None) -> None:
        """Listen for ranks, start those of this machine.

        `exit_record`: that of this process, which may be ended with its engine; None = it may not.

        Raises ConfigError: `--dist-init-addr` cannot be had here, or this is not machine 0.
        """
        parallel = config.parallel
        if parallel.node_rank:
            raise ConfigError(f"engine: --node-rank is {parallel.node_rank}, expected 0: the leader lives there")
        self._config = config
        self._mesh = mesh_of(config)
        # A group that Ctrl-C does not reach (the front drains first): this process's own where it is an engine's, so
        # that the front can signal all of the engine at once; else new ones.
        self._group = os.getpgrp() if exit_record is not None else 0
        self._exit_record = exit_record or ExitRecord()
        self._folder = PrivateFolder(self._exit_record.folder)
        home = self._folder.path
        self._host = "127.0.0.1"
        bind = f"ipc://{home}/leader"
        if parallel.dist_init_addr:
            self._host, port = split_host_port(parallel.dist_init_addr, "config: --dist-init-addr")
            bind = tcp_url(self._host, port)
        self.links = LeaderLinks(
            bind,
            mesh=self._mesh,
            clock=clock,
            settings=shared_settings(config),
            secret=config.pd.cluster_secret,
            silence_s=parallel.silence_s_max,
        )
        """The connections to the ranks."""
        self.links.why = self._why
        self._supervisor = LeaderSupervisor(
            self.links,
            silence_s=parallel.silence_s_max,
            clock=clock,
            exit_record=self._exit_record,
            ends_process=exit_record is not None,
        )
        self._meeting: Any = None
        self._comm: Comm | None = None
        config_file = home / "config.json"
        config_file.write_text(self._config.to_json())
        self._supervisor.start(lambda: self._spawn(config_file))

    def _spawn(self, config_file: Path) -> dict[int, subprocess.Popen[bytes]]:
        env = rank_env(self._config)
        return {
            rank: subprocess.Popen(
                rank_words(config_file, rank, self.links.address),
                env=env,
                stdin=subprocess.DEVNULL,
                process_group=self._group,
            )
            for rank in self._config.parallel.local_ranks
            if rank
        }

    def join(self) -> Comm:
        """Wait until all ranks are connected. Raises ConfigError, PeerGone: see `explained`."""
        from serinus.parallel.comm import TorchComm, listen
        from serinus.ranks.devices import comm_device

        s_max = self._config.parallel.dist_s_max
        self._meeting = listen(host_port(self._host, 0))
        self.links.welcome(RankWelcome(store=self._meeting.address))
        self.links.gather(self._supervisor.check, s_max)
        self._comm = TorchComm(
            self._meeting,
            self._mesh,
            0,
            device=comm_device(self._config, 0),
            host=self._host,
            timeout_s=s_max,
            check=self._supervisor.check,
        )
        return self._comm

    def _why(self) -> str:
        """Which rank is lost and why, once the supervisor has decided. Empty: none is."""
        ending = self._exit_record.wait(_VERDICT_S)
        return "" if ending is None else ending.reason

    def explained(self, error: PeerGone) -> ConfigError | PeerGone:
        """What the supervisor knows of an error of the ranks' lines, after a moment; else the error itself."""
        ending = self._exit_record.wait(_VERDICT_S)
        return error if ending is None else LeaderSupervisor.error(ending)

    def facts(self) -> list[dict[str, Any]]:
        """All ranks, the leader first: rank, name, tp_rank, pp_rank, pid, host."""
        leader = RankFacts(rank=0, pid=os.getpid(), host=socket.gethostname())
        return [
            {
                **asdict(each),
                "name": self._mesh.name(each.rank),
                "tp_rank": self._mesh.tp_rank(each.rank),
                "pp_rank": self._mesh.pp_rank(each.rank),
            }
            for each in (leader, *(self.links.facts[rank] for rank in sorted(self.links.facts)))
        ]

    def dismiss(self) -> None:
        """They are about to be told to stop: that they end is no loss from now on."""
        self._supervisor.dismiss()

    def fail(self, error: BaseException) -> None:
        """The engine does not come up: tell the ranks why, and end them."""
        code = CONFIG_CODE if isinstance(error, ConfigError) else LOST_CODE
        self._close(EngineExit(reason=f"engine: the leader failed: {error}", code=code))

    def close(self) -> None:
        """End what has not ended. The ranks should have been told to stop. May be called again."""
        self._close(None)

    def _close(self, failure: EngineExit | None) -> None:
        self._supervisor.close(failure)
        self.links.close(0.0)
        if self._comm is not None:
            self._comm.close()
        self._folder.close()

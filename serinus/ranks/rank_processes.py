"""RankProcesses: the other ranks of an engine, as its leader starts, finds and ends them.

    processes = RankProcesses(config, clock)           # ranks of this machine are started, and import what they need
    links = LeaderLinks(processes.control_bind, ...)   # the leader's line
    processes.start(control=links.address)             # all that report are told where everything is
    comm = processes.join()                            # all have reported; tensors can travel

On one machine everything is in a private directory and on loopback; with `--nnodes` ranks of other machines report at
`--dist-init-addr` and are told there where the rest is. Knows nothing of what ranks do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from serinus.core.clock import Clock
from serinus.core.config import ServeConfig
from serinus.core.cores import engine_threads, threads_env
from serinus.core.errors import ConfigError, PeerGone
from serinus.core.ids import new_token
from serinus.core.private_folder import PrivateFolder
from serinus.parallel import Mesh
from serinus.ranks.exit_reason import CONFIG_CODE, LOST_CODE, EngineExit, ExitRecord
from serinus.ranks.leader_supervisor import LeaderSupervisor, RankFacts
from serinus.wire.messages import WatchWelcome

if TYPE_CHECKING:
    from serinus.parallel.comm import Comm

__all__ = ["RankProcesses", "mesh_of", "rank_env", "rank_words", "shared_settings", "signed"]

_OWN_GROUPS: Final = frozenset({"server"})
_OWN_SETTINGS: Final = frozenset(
    {
        "model.model_path",
        "model.tokenizer_path",
        "kernels.threads",
        "parallel.node_rank",
        "cache.hicache_storage_dir",
        "cache.kv_events_config",
        "pd.bootstrap_host",
        "pd.bootstrap_port",
        "pd.prefill_addresses",
        "pd.cluster_secret",
    }
)
"""What may differ from machine to machine, or must not travel."""
_VERDICT_S: Final = 3.0
"""The supervisor knows within this time whose end it was that broke a line (not, that a process stands still)."""


def mesh_of(config: ServeConfig) -> Mesh:
    """The ranks of an engine of these settings."""
    return Mesh(tp=config.parallel.tp_size, pp=config.parallel.pp_size)


def shared_settings(config: ServeConfig) -> str:
    """What all ranks must agree on, as JSON."""
    tree = {
        group: {name: value for name, value in values.items() if f"{group}.{name}" not in _OWN_SETTINGS}
        for group, values in asdict(config).items()
        if group not in _OWN_GROUPS
    }
    return json.dumps(tree, sort_keys=True)


def signed(secret: str, rank: int, settings: str) -> bytes:
    """Proof that a rank knows the cluster's secret; nothing where there is none."""
    if not secret:
        return b""
    return hmac.new(secret.encode(), f"{rank} {settings}".encode(), hashlib.sha256).digest()


def rank_words(config_file: Path, rank: int, watch: str) -> list[str]:
    """The command that runs a rank which ends with this process."""
    words = ["-m", "serinus.ranks.process", "--config", str(config_file), "--rank", str(rank), "--watch", watch]
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
        self._exit_record = exit_record or ExitRecord()
        self._host = parallel.dist_init_addr.rpartition(":")[0]
        self._folder = PrivateFolder(self._exit_record.folder)
        home = self._folder.path
        self.token = new_token()
        """What only the ranks of this engine know."""
        self.control_bind = f"tcp://{self._host}:0" if self._host else f"ipc://{home}/control"
        """Where the leader's line may listen."""
        self._supervisor = LeaderSupervisor(
            f"tcp://{parallel.dist_init_addr}" if self._host else f"ipc://{home}/watch",
            mesh=self._mesh,
            settings=shared_settings(config),
            expected_mac=lambda rank, settings: signed(config.pd.cluster_secret, rank, settings),
            silence_s=parallel.watchdog_s_max,
            clock=clock,
            exit_record=self._exit_record,
            ends_process=exit_record is not None,
        )
        self._meeting: Any = None
        self._comm: Comm | None = None
        config_file = home / "config.json"
        config_file.write_text(self._config.to_json())
        self._supervisor.start(lambda: self._spawn(config_file))

    def start(self, *, control: str) -> None:
        """Tell the ranks that the leader's line is at `control`."""
        from serinus.parallel.comm import listen

        self._meeting = listen(f"{self._host or '127.0.0.1'}:0")
        self._supervisor.welcome(WatchWelcome(control=control, store=self._meeting.address, token=self.token))

    def _spawn(self, config_file: Path) -> dict[int, subprocess.Popen[bytes]]:
        env = rank_env(self._config)
        return {
            rank: subprocess.Popen(
                rank_words(config_file, rank, self._supervisor.address),
                env=env,
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the front alone, which drains first
            )
            for rank in self._config.parallel.local_ranks
            if rank
        }

    def join(self) -> Comm:
        """Wait until all ranks are connected. Raises ConfigError, PeerGone: which rank is missing or lost, and why."""
        from serinus.parallel.comm import TorchComm
        from serinus.ranks.devices import comm_device

        s_max = self._config.parallel.dist_s_max
        self._supervisor.gather(s_max)
        device = comm_device(self._config, 0)
        try:
            self._comm = TorchComm(
                self._meeting,
                self._mesh,
                0,
                device=device,
                host=self._host or "127.0.0.1",
                timeout_s=s_max,
                check=self.check,
            )
        except PeerGone as error:
            raise self.explained(error) from error
        return self._comm

    def check(self) -> None:
        """Raise PeerGone (ConfigError where settings are at fault) once a rank is lost. Cost: an attribute."""
        self._supervisor.check()

    def why(self, s_max: float = _VERDICT_S) -> str:
        """Which rank is lost and why; waits so long for the supervisor to decide. Empty: none is."""
        ending = self._exit_record.wait(s_max)
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
            for each in (leader, *self._supervisor.facts())
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
        if self._comm is not None:
            self._comm.close()
        self._folder.close()

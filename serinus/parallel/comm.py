"""Comm: tensors between the ranks of one engine, while they run one and the same step.

Two of a kind: SoloComm (one rank) and TorchComm (processes: NCCL on GPUs; on the CPU gloo, and memory that the ranks of
a stage share where they are on one machine); `testing` has one for threads. All ranks of a stage call the collectives
in the same order, because all run the same plans in the same order; whether a rank enters one depends on what it alone
sees in one case only: it has no memory for a step. It abandons the step, and so do all that wait for it.
Needs torch, unlike the rest of the room: import it by its module path.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Event
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from serinus.core.addresses import host_port, split_host_port
from serinus.core.clock import Clock, WallClock
from serinus.core.errors import ConfigError, PeerGone, StepAbandoned
from serinus.parallel.mesh import Mesh
from serinus.parallel.near import NearFile, NearStage

_torch: Any = dist
"""torch.distributed without types: its stores and groups have none."""
_TAG: Final = 0
"""The tag of activations; a slice has one connection to the next stage."""
_WHERE: Final = "parallel: the leader's address"
_KNOCK_S: Final = 1.0
_RETRY_S: Final = 0.1
_LOOK_S: Final = 0.01
_KEPT: Final = 2
"""Tensors kept after a send, for each stage: the leader has no more plans open than stages, so older ones are out."""
_SEE_OFF_S: Final = 2.0
_ALL_BITS: Final = 0xFF
_GROUPS: dict[str, Any] = {
    name: getattr(_torch, f"ProcessGroup{name}") for name in ("Gloo", "NCCL") if hasattr(_torch, f"ProcessGroup{name}")
}


class Comm(Protocol):
    """One rank's end. Not for several threads at once. Every call raises PeerGone where another rank fails it; those
    that wait for a tensor raise StepAbandoned where the rank that was to send it has abandoned the step."""

    mesh: Mesh
    rank: int
    peers: StagePeers | None
    """What exchanges small tensors through memory that the ranks of a stage share; None = there is no such memory."""

    @property
    def waited_s(self) -> float:
        """Seconds its caller has spent waiting for other ranks; on a GPU, where the stream waits, next to none."""

    @property
    def can_abandon(self) -> bool:
        """Whether ranks can leave a step together. NCCL, and gloo between slices on several machines, cannot."""

    def begin(self, step: int) -> None:
        """The tensors of this step follow; numbers grow, from 1. After a step that this rank has abandoned it waits
        until all ranks of the stage have left that one."""

    def abandon(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Leave the step that was begun: the others get StepAbandoned where they wait for this rank, and what was sent
        to this rank for the step is dropped. `shape`, `dtype`: of the activations of the step."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the ranks of the stage, in place; the same bits on each. Returns x, contiguous."""

    def gather_last(self, x: Tensor) -> Tensor | None:
        """The x of all ranks of the stage side by side along the last dimension, on slice 0; None on the others.
        Shapes are equal on all ranks."""

    def broadcast(self, x: Tensor) -> Tensor:
        """The x of slice 0 on all ranks of the stage, in place. Returns x, contiguous."""

    def send(self, x: Tensor) -> None:
        """Send x to the same slice of the next stage. x is kept until it is out, and must not be written meanwhile.
        Returns at once as long as fewer than two tensors for each stage are on their way."""

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor from the same slice of the stage before, in order. On the CPU it waits for it."""

    def smallest(self, values: Sequence[int]) -> tuple[int, ...]:
        """Of each value the smallest over all ranks. Slow; all ranks call it, at start-up. Without values it is a
        barrier."""

    def close(self) -> None:
        """Release everything, once what was sent is out (two seconds at most, and not where a rank was lost). A rank
        that waits for more of this one gets PeerGone. Idempotent; no other call may follow."""


class StagePeers(Protocol):
    """Exchanges of some tensors, as Comm has them, and sums of products; of which, is the same on all ranks.
    kernels.triton.peer_exchange has it."""

    def linear_all_reduce(self, x_TI: Tensor, packed: Any) -> Tensor | None:
        """The products of all ranks' x and weights (kernels.PackedLinear), added up; None: there is no such kernel for
        this shape, which is the same on all ranks."""

    def all_reduce(self, x: Tensor) -> bool:
        """Whether x was added up."""

    def gathers(self, x: Tensor) -> bool:
        """Whether `gather_last` takes such an x."""

    def gather_last(self, x: Tensor) -> Tensor | None:
        """As that of Comm."""

    def broadcast(self, x: Tensor) -> bool:
        """Whether x is that of slice 0 now."""


class SoloComm:
    """The Comm of an engine of one rank: sums are the rank's own, and there is no other stage."""

    def __init__(self) -> None:
        self.mesh = Mesh()
        self.rank = 0
        self.peers: StagePeers | None = None
        self.waited_s = 0.0
        self.can_abandon = True

    def begin(self, step: int) -> None:
        pass

    def abandon(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_last(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def send(self, x: Tensor) -> None:
        """Raises ValueError: there is no next stage."""
        raise ValueError("parallel: a send on one rank, expected a next stage")

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Raises ValueError: there is no stage before."""
        raise ValueError("parallel: a recv on one rank, expected a stage before")

    def smallest(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(values)

    def close(self) -> None:
        pass


class Meeting:
    """Where the processes of one engine find each other: a store that the leader keeps."""

    def __init__(self, store: Any, address: str, kept: object = None) -> None:
        self.store = store
        self.address = address
        """host:port at which the followers find it."""
        self._kept = kept


def listen(address: str) -> Meeting:
    """Leader: be found at host:port (port 0 = any free one), on that address alone.

    Raises ConfigError: the address is not host:port, not one of this machine, or in use.
    """
    host, port = split_host_port(address, _WHERE)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(found[4][:2], family=found[0], backlog=128)
    except OSError as error:
        raise ConfigError(
            f"parallel: cannot listen on {address} ({error}), expected a free address of this machine"
        ) from None
    port = listener.getsockname()[1]
    store = _torch.TCPStore(
        host_name=host, port=port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
        use_libuv=True,
    )  # fmt: skip
    return Meeting(store, host_port(host, port))


def find(address: str, timeout_s: float = 60.0) -> Meeting:
    """Follower: connect to the leader's meeting.

    Raises PeerGone: no leader listens there within `timeout_s`. Raises ConfigError: the address is not host:port.
    """
    host, port = split_host_port(address, _WHERE)
    spent_s, reason = 0.0, ""
    while spent_s < timeout_s:  # torch would wait as well, with pages of C++ on stderr
        try:
            socket.create_connection((host, port), timeout=_KNOCK_S).close()
            store = _torch.TCPStore(
                host_name=host, port=port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
            return Meeting(store, address)
        except TimeoutError as error:
            spent_s, reason = spent_s + _KNOCK_S, str(error)
        except (OSError, RuntimeError) as error:
            spent_s, reason = spent_s + _RETRY_S, str(error).splitlines()[0]
            Event().wait(_RETRY_S)
    raise PeerGone(f"parallel: no leader at {address} within {timeout_s:g} s ({reason})")


def _abandoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What is sent in the place of activations of a step that is abandoned: all bits set, which nothing computes."""
    x = torch.empty(tuple(shape), dtype=dtype)
    x.view(torch.uint8).fill_(_ALL_BITS)
    return x


def _is_abandoned(x: Tensor) -> bool:
    return int(x[:1].view(torch.uint8).min()) == _ALL_BITS


class _Closed:
    """Takes the place of a group that was closed."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} after close")

    def abort(self) -> None:
        pass


class TorchComm:
    """One rank's end where ranks are processes. Contracts of the calls: Comm. torch's default group is not touched."""

    def __init__(
        self,
        meeting: Meeting,
        mesh: Mesh,
        rank: int,
        *,
        device: str = "cpu",
        host: str = "",
        timeout_s: float = 60.0,
        check: Callable[[], None] | None = None,
        clock: Clock | None = None,
        near: bool = True,
    ) -> None:
        """Wait for all ranks, then connect to those of the own stage and of the own slice.

        Args:
            meeting: from `listen` (rank 0) or `find`.
            device: `cpu` (gloo) or this rank's own `cuda:i` (NCCL).
            host: gloo: the address at which other ranks reach this one; empty = that of the meeting's host.
            timeout_s: longest wait, for ranks to come now and for any tensor later.
            check: called again and again while ranks are waited for here or in `smallest`; raises where one is lost.
            clock: what `waited_s` counts by; None = the machine's.
            near: whether ranks of one stage and machine may add up in memory instead of through gloo.
        Raises:
            PeerGone: ranks that did not come in time, each named.
            ConfigError: torch has no backend for the device, or `host` is no address of this machine.
        """
        self.mesh = mesh
        self.rank = rank
        self._waited_s = 0.0
        self._clock = clock or WallClock()
        self._check = check
        self._meeting = meeting
        self._timeout_s = timeout_s
        self._device = device
        self._round = 0
        self._broken = False
        """Whether a call has failed because another rank is gone."""
        self.peers: StagePeers | None = None
        """Calls of a stage without a group, where its GPUs see each other's memory."""
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._owes_recv = self._owes_send = False
        """What this rank has not done of the step that was begun."""
        stage, line = f"stage-{mesh.pp_rank(rank)}", f"line-{mesh.tp_rank(rank)}"
        self._fence("join")
        self._near = self._meet_near(stage) if near and mesh.tp > 1 and device == "cpu" else None
        self._stage: Any = None if self._near is not None else self._group(stage, mesh.tp_rank(rank), mesh.tp, host)
        self._line: Any = self._group(line, mesh.pp_rank(rank), mesh.pp, host)

    @property
    def waited_s(self) -> float:
        return self._waited_s + (0.0 if self._near is None else self._near.waited_s)

    @property
    def can_abandon(self) -> bool:
        return self._device == "cpu" and self._stage is None

    def begin(self, step: int) -> None:
        stage = self.mesh.pp_rank(self.rank)
        self._owes_recv, self._owes_send = stage > 0, stage < self.mesh.pp - 1
        if self._near is not None:
            self._near.begin(step)

    def abandon(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        """As Comm says. Raises MemoryError, RuntimeError: there is no memory for that either."""
        if self._near is not None:
            self._near.abandon()
        if self._owes_recv:
            with suppress(StepAbandoned):
                self.recv(shape, dtype)
        if self._owes_send:
            self.send(_abandoned(shape, dtype))

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._near is not None:
            return self._near.all_reduce(x)
        if self._stage is not None and not (self.peers is not None and self.peers.all_reduce(x)):
            self._wait(lambda: self._stage.allreduce([x]))
        return x

    def gather_last(self, x: Tensor) -> Tensor | None:
        if self._near is not None:
            return self._near.gather_last(x)
        if self._stage is None:
            return x
        if self.peers is not None and self.peers.gathers(x):
            return self.peers.gather_last(x)
        options = _torch.GatherOptions()
        options.rootRank = 0
        if self.mesh.tp_rank(self.rank):
            self._wait(lambda: self._stage.gather([], [x.contiguous()], options))
            return None
        found = x.new_empty((self.mesh.tp, *x.shape))
        self._wait(lambda: self._stage.gather([list(found.unbind(0))], [x.contiguous()], options))
        return found.movedim(0, -2).flatten(-2)

    def broadcast(self, x: Tensor) -> Tensor:
        if self._near is not None:
            return self._near.broadcast(x)
        if self._stage is not None and not (self.peers is not None and self.peers.broadcast(x)):
            options = _torch.BroadcastOptions()
            options.rootRank = 0
            self._wait(lambda: self._stage.broadcast([x], options))
        return x

    def send(self, x: Tensor) -> None:
        """As Comm says. Raises PeerGone where another rank is gone."""
        while self._sent and (len(self._sent) >= _KEPT * self.mesh.pp or self._sent[0][0].is_completed()):
            self._done(self._sent.popleft()[0])  # gloo reports completion only to a caller that waits
        try:
            work = self._line.send([x], self.mesh.pp_rank(self.rank) + 1, _TAG)
        except RuntimeError as error:
            raise self._gone(error) from None
        self._sent.append((work, x))
        self._owes_send = False

    def recv(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As Comm says; on a GPU the stream waits, not the caller. Raises StepAbandoned: the stage before did."""
        x = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        self._wait(lambda: self._line.recv([x], self.mesh.pp_rank(self.rank) - 1, _TAG))
        self._owes_recv = False
        if self.can_abandon and _is_abandoned(x):
            raise StepAbandoned("parallel: the stage before has abandoned this step")
        return x

    def smallest(self, values: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(min, zip(*self.told(values), strict=True)))

    def told(self, values: Sequence[int]) -> list[list[int]]:
        """The values of all ranks, by rank. As `smallest`, but they may have different numbers of them."""
        self._round += 1
        return self._fence(f"round-{self._round}", values)

    def close(self) -> None:
        self._see_off()
        if self._near is not None:
            self._near.close()
        if self._device != "cpu":
            for group in (self._stage, self._line):
                if group is not None:
                    group.abort()  # what NCCL still runs would keep the device
        self._stage = self._line = _Closed()  # the connections close when the last reference to a group goes

    def _fence(self, key: str, values: Sequence[int] = ()) -> list[list[int]]:
        """The values of every rank, by rank, once all have come. Raises PeerGone, naming the ranks that did not."""
        store, keys = self._meeting.store, [f"{key}/{rank}" for rank in range(self.mesh.size)]
        until = self._clock.now() + self._timeout_s
        try:
            store.set(keys[self.rank], json.dumps(list(values)))
            while not store.check(keys) and self._clock.now() < until:
                if self._check is not None:
                    self._check()
                Event().wait(_LOOK_S)
            missing = [self.mesh.name(rank) for rank, each in enumerate(keys) if not store.check([each])]
            if not missing:
                return [json.loads(store.get(each)) for each in keys]
        except RuntimeError as error:
            raise self._gone(error) from None
        raise PeerGone(
            f"parallel: {', '.join(missing)} did not come to {self._meeting.address} within {self._timeout_s:g} s,"
            f" expected all {self.mesh.size} ranks"
        )

    def _meet_near(self, stage: str) -> NearStage | None:
        """Memory with all ranks of the stage; None where one of them is on another machine."""
        store, index, size = self._meeting.store, self.mesh.tp_rank(self.rank), self.mesh.tp
        file: NearFile | None = None
        try:
            if index == 0 and NearFile.possible():
                file = NearFile.make(size)
            if index == 0:
                store.set(f"near-{stage}", "" if file is None else file.path.name)
            self._fence("named")
            name = store.get(f"near-{stage}").decode()
            if index and name and NearFile.possible():
                file = NearFile.find(name, index, size)
            first = self.mesh.rank_of(tp_rank=0, pp_rank=self.mesh.pp_rank(self.rank))
            have = [bool(said[0]) for said in self._fence("near", (file is not None,))[first : first + size]]
        except RuntimeError as error:
            raise self._gone(error) from None
        finally:
            if file is not None and index == 0:
                file.path.unlink()
        if file is None:
            return None
        if not all(have):
            file.close()
            return None
        return NearStage(file, index, size, self._clock, self._timeout_s, self._check)

    def _group(self, name: str, index: int, size: int, host: str) -> Any:
        """The group of the ranks that share a stage or a slice; None where that is this rank alone."""
        if size == 1:
            return None
        backend = "Gloo" if self._device == "cpu" else "NCCL"
        if backend not in _GROUPS:
            raise ConfigError(f"parallel: this torch has no {backend} for device {self._device}, expected one that has")
        kind = _GROUPS[backend]
        options = (kind._Options if backend == "Gloo" else kind.Options)()
        options._timeout = timedelta(seconds=self._timeout_s)
        try:
            if backend == "Gloo":
                address = host or split_host_port(self._meeting.address, _WHERE)[0]
                options._devices = [kind.create_device(hostname=address)]
            elif torch.device(self._device).index is not None:
                torch.cuda.set_device(self._device)
            group = kind(_torch.PrefixStore(name, self._meeting.store), index, size, options)
        except RuntimeError as error:
            raise PeerGone(
                f"parallel: {self.mesh.name(self.rank)} cannot reach its {name} ({str(error).splitlines()[0]}),"
                f" expected {size} ranks"
            ) from None
        return group

    def _wait(self, start: Callable[[], Any]) -> None:
        began = self._clock.now()
        try:
            start().wait()
        except RuntimeError as error:
            raise self._gone(error) from None
        self._waited_s += self._clock.now() - began

    def _done(self, work: Any) -> None:
        """Wait until a tensor is out. Raises PeerGone where it cannot be sent."""
        try:
            work.wait()
        except RuntimeError as error:
            raise self._gone(error) from None

    def _see_off(self) -> None:
        """Wait at most _SEE_OFF_S for tensors on their way: gloo reports each only to a caller that waits, NCCL when
        asked."""
        until = self._clock.now() + _SEE_OFF_S
        while self._sent and not self._broken:
            work, left_s = self._sent[0][0], max(until - self._clock.now(), 0.0)
            try:
                if self._device == "cpu":
                    work.wait(timedelta(seconds=left_s + _LOOK_S))
                elif not work.is_completed() and left_s > 0:
                    Event().wait(_LOOK_S)
                    continue
            except RuntimeError:  # the receiver did not take it, or is gone
                break
            self._sent.popleft()
        self._sent.clear()

    def _gone(self, error: RuntimeError) -> PeerGone:
        self._broken = True
        return PeerGone(f"parallel: {self.mesh.name(self.rank)} lost a rank of its mesh ({str(error).splitlines()[0]})")

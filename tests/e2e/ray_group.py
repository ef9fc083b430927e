"""A Ray cluster of several nodes on this machine, and `serinus up --ray` on it as a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from serinus.testing.servers import READY, Server

NAMESPACE = "serinus"
KEY = "the-operator"
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}
_ROLES = ("prefill-", "decode-", "unified-")


class RayGroup:
    """The cluster, the group, and questions to both."""

    def __init__(self, cluster: Any, server: Server) -> None:
        self.cluster = cluster
        self.server = server

    def routers(self) -> dict[str, str]:
        """URL of each router that a living actor hosts, by the node's id."""
        return {each["node"]: each["url"] for each in self._states("router-") if each["url"]}

    def engines(self) -> dict[str, dict[str, Any]]:
        """What the actors of engines' ranks say, by name."""
        return {each["name"]: each for each in self._states(*_ROLES)}

    def _states(self, *begin: str) -> list[dict[str, Any]]:
        import ray

        names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        found = []
        for name in names:
            if name.startswith(begin):
                with contextlib.suppress(ray.exceptions.RayError, ValueError):  # it ends just now
                    actor = ray.get_actor(name, namespace=NAMESPACE)
                    found.append(ray.get(actor.state.remote(), timeout=60))
        return found

    def actor(self, name: str) -> dict[str, Any]:
        """What the actor of this name says."""
        (found,) = [each for each in self._states(name) if each["name"] == name]
        return found

    def workers(self, url: str) -> dict[str, dict[str, Any]]:
        """The engines as one router has them, by URL."""
        answer = httpx.get(f"{url}/workers", headers={"authorization": f"Bearer {KEY}"}, timeout=60)
        return {each["url"]: each for each in answer.json()["workers"]}

    def kill_node(self, node: str) -> None:
        """As a machine that is cut off the power: its raylet, and all that it hosts."""
        hosts = self._states("router-", *_ROLES)
        pids = [each["pid"] for each in hosts if each["node"] == node and each["alive"]]  # others have no process yet
        (found,) = [each for each in self.cluster.worker_nodes if each.node_id == node]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # the engine behind it ends with it
        self.cluster.remove_node(found, allow_graceful=False)


@contextlib.contextmanager
def ray_group(model: Path, *words: str, nodes: int = 2, cores: int = 2, ready: str = READY) -> Iterator[RayGroup]:
    """A head and some more nodes of so many logical cores, and the group on them, once it has printed `ready`."""
    import ray  # an extra that this suite is collected without
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": cores, "include_dashboard": False})
    try:
        for _ in range(nodes):
            cluster.add_node(wait=False, **{**NODE, "num_cpus": cores})
        cluster.wait_for_nodes(120)
        address = ("--ray", "--ray-address", cluster.address, "--admin-api-key", KEY)
        with Server("up", str(model), *address, *words, ready=ready, timeout_s=240) as server:
            ray.init(address=cluster.address, namespace="test", log_to_driver=False, logging_level="error")
            try:
                yield RayGroup(cluster, server)
                if server.process.poll() is None:
                    assert server.stop(120) == 0, server.output
            finally:
                ray.shutdown()
    finally:
        cluster.shutdown()

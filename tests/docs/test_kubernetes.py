"""deploy/kubernetes: manifests that Kubernetes takes; commands, probes and pauses in them are Serinus's own."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from serinus.cli.main import COMMANDS
from serinus.cli.parser import add_settings, make_parser, read_config
from serinus.core.config import ConfigTree, RouterConfig, ServeConfig, UpConfig
from serinus.front.routes import ENDPOINTS

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
TREES: dict[str, type[ConfigTree]] = {"serve": ServeConfig, "router": RouterConfig, "up": UpConfig}
KUBERNETES = "1.31"


def fields(required: str = "", /, **types: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object that has these fields and no others."""
    return {"type": "object", "required": required.split(), "additionalProperties": False, "properties": types}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
POD = fields(metadata=fields(labels=TEXTS), spec={"type": "object", "required": ["containers"]})
RAY_JOB = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=fields(
        "entrypoint rayClusterSpec",
        entrypoint=TEXT,
        submissionMode={"const": "K8sJobMode"},
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=NUMBER,
        backoffLimit=NUMBER,
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            enableInTreeAutoscaling=FLAG,
            autoscalerOptions=fields(idleTimeoutSeconds=NUMBER),
            headGroupSpec=fields("rayStartParams template", rayStartParams=TEXTS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": fields(
                    "groupName maxReplicas minReplicas rayStartParams template",
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    rayStartParams=TEXTS,
                    template=POD,
                ),
            },
        ),
    ),
)
"""What the manifest uses of KubeRay's RayJob: names, types and required fields were read in the CRD of v1
(ray-project/kuberay, helm-chart/kuberay-operator/crds/ray.io_rayjobs.yaml at 037e91b0) and held against its Go types
(ray-operator/apis/ray/v1 at 00572105 and 026f1433); `submissionMode` is a text there, and its operator knows this one.
`metadata` and `entrypoint` are not required there, and are here. What a pod has is Kubernetes's own: the last test."""


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """Every pod template in an object."""
    if isinstance(value, dict):
        if "containers" in value.get("template", {}).get("spec", {}):
            yield value["template"]
        for each in value.values():
            yield from templates(each)
    elif isinstance(value, list):
        for each in value:
            yield from templates(each)


def config_of(words: list[str]) -> Any:
    """The settings that a command line of a manifest stands for."""
    command = next(each for each in COMMANDS if each.name == words[1])
    parser = make_parser(command)
    add_settings(parser, TREES[words[1]], positional_model=words[1] != "router")
    return read_config(TREES[words[1]], parser, words[2:])[0]


def containers() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod, container) of the plain manifests."""
    pods = [each["spec"] for each in templates(documents("serinus.yaml"))]
    return [(pod, pod["containers"][0]) for pod in pods]


def test_the_commands_are_ones_that_serinus_takes() -> None:
    roles = [config_of(container["args"]) for _, container in containers()]
    assert [getattr(each, "role", "router") for each in roles] == ["prefill", "decode", "router"]
    (job,) = (each for each in documents("rayjob.yaml") if each["kind"] == "RayJob")
    up = config_of(shlex.split(job["spec"]["entrypoint"]))
    assert up.ray.ray
    assert up.ray.between("decode", up.up.decode) == (1, 8)
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]
    cores = workers["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]
    assert int(cores) == up.kernels.threads, "an engine fills a worker"
    assert workers["maxReplicas"] == up.ray.max_prefill + up.ray.max_decode


def test_probes_ask_open_endpoints_and_a_pod_lives_long_enough_to_drain() -> None:
    open_paths = {spec.path for spec in ENDPOINTS if spec.keys == "none"}
    for pod, container in containers():
        for probe in ("readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["path"] in open_paths
        assert container["livenessProbe"]["httpGet"]["path"] != "/health", "it is 503 while requests are drained"
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > pause + config_of(container["args"]).server.drain_s_max


def test_the_routers_name_every_engine_that_there_is() -> None:
    sets = [each for each in documents("serinus.yaml") if each["kind"] == "StatefulSet"]
    names = {
        role: {
            f"http://{each['metadata']['name']}-{number}.{each['spec']['serviceName']}:30000"
            for each in sets
            for number in range(each["spec"]["replicas"])
            if each["metadata"]["labels"]["role"] == role
        }
        for role in ("prefill", "decode")
    }
    router = config_of(containers()[-1][1]["args"])
    assert set(router.route.decode_urls) == names["decode"]
    assert set(router.route.prefill_urls) == names["prefill"]


def places(schema: dict[str, Any], value: Any) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """(object, field, schema of that object) of all that a schema says of a value."""
    if isinstance(value, list):
        for each in value:
            yield from places(schema["items"], each)
    elif isinstance(value, dict) and "properties" in schema:
        for name in [*value]:
            yield value, name, schema
            yield from places(schema["properties"][name], value[name])


def test_the_ray_job_has_the_structure_of_one_and_a_wrong_one_is_seen() -> None:
    """Each field in turn: its name misspelt, a value of another type, and left out where it is required."""
    (job,) = (each for each in documents("rayjob.yaml") if each["kind"] == "RayJob")
    jsonschema.validate(job, RAY_JOB)
    is_right = jsonschema.Draft202012Validator(RAY_JOB).is_valid
    found = [*places(RAY_JOB, job)]
    assert len(found) == 30
    for held, name, schema in found:
        value = held.pop(name)
        held[f"{name}s"] = value
        assert not is_right(job), f"{name} misspelt"
        del held[f"{name}s"]
        assert is_right(job) == (name not in schema["required"]), f"without {name}"
        held[name] = [value]
        assert not is_right(job), f"{name} of another type"
        held[name] = value
    assert is_right(job)


@pytest.mark.proof
def test_kubernetes_own_schemas_take_the_manifests() -> None:
    import kubernetes_validate

    pods = [*templates(documents("rayjob.yaml"))]
    assert len(pods) == 2
    plain = [each for name in ("serinus.yaml", "rayjob.yaml") for each in documents(name) if each["kind"] != "RayJob"]
    assert len(plain) == 8
    as_pods = [{"apiVersion": "v1", "kind": "Pod", **pod, "metadata": {"name": "x", **pod["metadata"]}} for pod in pods]
    for each in (*plain, *as_pods):
        assert kubernetes_validate.validate(each, KUBERNETES, strict=True)
    plain[0]["spec"]["clusterIp"] = "None"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(plain[0], KUBERNETES, strict=True)

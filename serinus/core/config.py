"""One frozen tree of settings per command, and the only reader of the environment and of settings files.

Order of precedence: command line, environment (`SERINUS_*`), settings file (YAML or TOML), default. Every value is
checked when its group is built; `to_json` and `from_json` hand a tree to a child process. Knows nothing of argparse.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from serinus.core.errors import ConfigError
from serinus.core.fleet_settings import ROLES, RaySettings, RouteSettings, UpSettings, role_settings, side_of
from serinus.core.setting import KINDS, Setting, check_value, settings_of
from serinus.core.settings import (
    CacheSettings,
    CanarySettings,
    KernelSettings,
    MemorySettings,
    ModelSettings,
    ParallelSettings,
    PdSettings,
    ScheduleSettings,
    ServerSettings,
)

Layer = Mapping[str, Mapping[str, Any]]
"""Values by group and field; what one source says."""

_GROUPS: dict[str, type] = {
    group.__name__: group
    for group in (
        ModelSettings, ServerSettings, MemorySettings, ScheduleSettings, CacheSettings, CanarySettings, PdSettings,
        ParallelSettings, KernelSettings, UpSettings, RaySettings, RouteSettings,
    )
}  # fmt: skip
_ROUTER_PORT = 8000
_OF_DECODE = ("prefill_addresses", "on_failure")
_OF_PREFILL = ("bootstrap_port",)
_OF_ALL = ("mode", "cluster_secret", "min_remote_tokens", "local_gain", "optimistic_prefill", "park_tokens")
"""Settings of PdSettings that only engines of one role take, and those that every engine takes: thresholds too, as
engines of several roles share files and variables. The others are of both roles."""
_TreeT = TypeVar("_TreeT", bound="ConfigTree")
_GroupT = TypeVar("_GroupT", ModelSettings, MemorySettings, ScheduleSettings, ParallelSettings, CanarySettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigTree:
    """A tree of settings: to JSON and back."""

    def to_json(self) -> str:
        """The whole tree as JSON text, for a child process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls: type[_TreeT], text: str) -> _TreeT:
        """Read what `to_json` wrote. Raises ConfigError for anything that is not a whole, valid tree."""
        try:
            data = json.loads(text)
        except ValueError as err:
            raise ConfigError(f"config: no JSON ({err}), expected what to_json wrote") from err
        if not isinstance(data, dict):
            raise ConfigError(f"config: a JSON {type(data).__name__}, expected an object of groups")
        return build_tree(cls, data)


_LEFT_OUT: dict[str, frozenset[str]] = {
    "UpConfig": frozenset(
        {
            "server.name",
            "pd.mode",
            "pd.bootstrap_host",
            "pd.bootstrap_port",
            "pd.prefill_addresses",
            "cache.kv_events_config",
            "parallel.nnodes",
            "parallel.node_rank",
            "parallel.dist_init_addr",
            "parallel.pp_layer_partition",
        }
    ),
    "RouterConfig": frozenset({"server.watchdog_s_max"}),  # it takes no steps
}
"""Settings of a tree's groups that its command decides by itself, or has no use for."""


def _roles_for(setting: Setting) -> tuple[str, ...]:
    """Of which roles the engines are that take a setting of handoffs."""
    if setting.name in _OF_ALL:
        return (*ROLES, "unified")
    return ("decode",) if setting.name in _OF_DECODE else ("prefill",) if setting.name in _OF_PREFILL else ROLES


def not_of_role(role: str) -> Iterator[Setting]:
    """The settings of handoffs that an engine of this role refuses but for their defaults."""
    return (setting for setting in settings_of(PdSettings) if role not in _roles_for(setting))


def _router_server() -> ServerSettings:
    return ServerSettings(port=_ROUTER_PORT)


def _paired() -> PdSettings:
    return PdSettings(local_gain=1.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(ConfigTree):
    """The groups of settings that engines have, whichever command starts them."""

    model: ModelSettings = field(default_factory=ModelSettings)
    """The model and its tokenizer."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """The HTTP server: of the engine, or of the router with `serinus up`."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """Size of the KV pools."""
    sched: ScheduleSettings = field(default_factory=ScheduleSettings)
    """Limits of a step and of the queues."""
    cache: CacheSettings = field(default_factory=CacheSettings)
    """Tiers below the device."""
    pd: PdSettings = field(default_factory=PdSettings)
    """Prefill and decode in separate engines."""
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    """Number of ranks and machines."""
    canary: CanarySettings = field(default_factory=CanarySettings)
    """Whether and how KV is checked."""
    kernels: KernelSettings = field(default_factory=KernelSettings)
    """Device, threads and kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(EngineConfig):
    """`serinus serve`: one engine and its front."""

    def __post_init__(self) -> None:
        if self.parallel.nnodes > 1 and self.pd.transfer_backend == "cuda_ipc":
            raise ConfigError(
                f"config: --disaggregation-transfer-backend is 'cuda_ipc' with {self.parallel.nnodes} hosts, expected"
                f" one host, or auto or tcp"
            )
        for setting in not_of_role(self.role):
            value = getattr(self.pd, setting.name)
            if value != setting.default:
                raise ConfigError(
                    f"config: {setting.flag} is {value!r} with --disaggregation-mode {self.pd.mode}, expected"
                    f" --disaggregation-mode {' or '.join(_roles_for(setting))}"
                )
        if self.sched.disable_radix_cache and self.cache.enable_hierarchical_cache:
            raise ConfigError(
                "config: --enable-hierarchical-cache is set with --disable-radix-cache, expected one of them: tiers"
                " keep the prefixes that requests share"
            )

    @property
    def role(self) -> str:
        """unified, prefill or decode."""
        return "unified" if self.pd.mode == "null" else self.pd.mode

    @property
    def engine_name(self) -> str:
        """Name of this engine in metrics, logs and meta_info."""
        return self.server.name or f"{self.role}-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig(EngineConfig):
    """`serinus up`: several engines and the router, here or on a Ray cluster. Inherited groups are each engine's."""

    up: UpSettings = field(default_factory=UpSettings)
    """Number of the engines."""
    ray: RaySettings = field(default_factory=RaySettings)
    """Whether they are on a Ray cluster."""
    server: ServerSettings = field(default_factory=_router_server)
    """The router's HTTP server; its keys and log level hold for the engines too."""
    pd: PdSettings = field(default_factory=_paired)
    """How KV travels; and that a prompt stays where its first token comes sooner."""

    prefill: Mapping[str, Any] = field(default_factory=dict)
    """By field, the settings (see role_settings) that were given for prefill engines only."""
    decode: Mapping[str, Any] = field(default_factory=dict)
    """The same of decode engines; with `--prefill 0`, of those that do both."""

    def __post_init__(self) -> None:
        for role in ROLES:
            gpus = getattr(self.up, f"{role}_gpus")
            if gpus and self.ray.ray:
                why = "with --ray, expected none: Ray gives engines their GPUs"
                raise ConfigError(f"config: --{role}-gpus is {gpus!r} {why}")
            if gpus and not getattr(self.up, role):
                raise ConfigError(f"config: --{role}-gpus is {gpus!r} with --{role} 0, expected none")
            for setting in role_settings(role):
                if setting.name not in getattr(self, role):
                    continue
                value = getattr(self, role)[setting.name]
                check_value(setting, value)
                if role == "prefill" and not self.up.prefill:
                    raise ConfigError(f"config: {setting.flag} is {value!r} with --prefill 0, expected prefill engines")
            if getattr(self.up, role):
                self.gpus_of(role, 0)
                self.engine(role=role, name=role, port=0, threads=1)
            self.ray.between(role, getattr(self.up, role))
        if self.up.prefill:
            self._check_stamps()

    def _check_stamps(self) -> None:
        """Pages travel with their stamps, so engines of both roles have the same ones, or none has any."""
        prefill, decode = map(self.canary_of, ROLES)
        flag, had = "kv-canary", (prefill.kv_canary, decode.kv_canary)
        if "none" not in had:
            flag, had = "kv-canary-real-data", (prefill.kv_canary_real_data, decode.kv_canary_real_data)
        if len(set(had)) > 1:
            raise ConfigError(
                f"config: --{flag} is {had[0]!r} of prefill and {had[1]!r} of decode engines, expected the same: they"
                f" refuse pages with other stamps than their own"
            )

    def ranks_of(self, role: str) -> ParallelSettings:
        """The numbers of ranks of an engine of this role."""
        return self._of_role(self.parallel, role)

    def canary_of(self, role: str) -> CanarySettings:
        """The canary of an engine of this role; one that is switched off for it takes over nothing."""
        is_off = self._given(role).get("kv_canary") == "none"
        return self._of_role(CanarySettings(kv_canary="none") if is_off else self.canary, role)

    def memory_of(self, role: str) -> MemorySettings:
        """The sizes of the pools of an engine of this role, where it has its device to itself."""
        return self._of_role(self.memory, role)

    def _shared_memory_of(self, role: str) -> MemorySettings:
        """The same, where it shares its device: a fraction is what engines take together, those of its role where it
        was given for that role, else all of this device."""
        memory, device = self.memory_of(role), self._of_role(self.model, role).device
        if memory.mem_fraction_static is None:
            return memory
        sharers = [other for other in ROLES if self._of_role(self.model, other).device == device]
        own = side_of(role)
        if "mem_fraction_static" in self._given(role):
            sharers = [own]
        of = {other: [self.gpus_of(other, number) for number in range(getattr(self.up, other))] for other in sharers}
        taken = Counter(gpu for engines in of.values() for gpus in engines for gpu in gpus)
        count = max(taken[gpu] for gpus in of[own] for gpu in gpus)
        return replace(memory, mem_fraction_static=memory.mem_fraction_static / count)

    def gpus_of(self, role: str, number: int) -> tuple[int, ...]:
        """Of each rank of one engine, the number of its GPU. Raises ConfigError: fewer are named than it has ranks."""
        size, named = self.ranks_of(role).size, self.up.gpus_of(role)
        if not named:
            return tuple(range(size))
        if len(named) < size:
            flag = f"--{side_of(role)}-gpus"
            raise ConfigError(f"config: {flag} names {len(named)} GPUs, expected one for each of {size} ranks")
        return tuple(named[(number * size + rank) % len(named)] for rank in range(size))

    def _given(self, role: str) -> Mapping[str, Any]:
        """What was given for engines of this role only."""
        given: Mapping[str, Any] = getattr(self, side_of(role))
        return given

    def _of_role(self, group: _GroupT, role: str) -> _GroupT:
        given = self._given(role)
        own: dict[str, Any] = {item.name: given[item.name] for item in settings_of(type(group)) if item.name in given}
        try:
            return replace(group, **own)
        except ConfigError as err:
            raise ConfigError(f"{err} (of {role} engines)") from err

    def _pd_of(self, role: str) -> PdSettings:
        """Its part in handoffs; it is not told what only the other role looks at."""
        own: dict[str, Any] = {setting.name: setting.default for setting in not_of_role(role)}
        return replace(self.pd, **own | {"mode": "null" if role == "unified" else role, "bootstrap_port": 0})

    def engine(self, *, role: str, name: str, port: int, threads: int) -> ServeConfig:
        """The settings of one engine: `role` unified, prefill or decode, on loopback, on `port`."""
        return ServeConfig(
            model=self._of_role(self.model, role),
            server=replace(
                self.server,
                host="127.0.0.1",
                port=port,
                name=name,
                ssl_certfile="",
                ssl_keyfile="",  # the router has TLS
            ),
            memory=self._shared_memory_of(role),
            sched=self._of_role(self.sched, role),
            cache=self.cache,
            pd=self._pd_of(role),
            parallel=self.ranks_of(role),
            canary=self.canary_of(role),
            kernels=replace(self.kernels, threads=threads),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(ConfigTree):
    """`serinus router`: the front of engines that run elsewhere."""

    server: ServerSettings = field(default_factory=_router_server)
    """The router's HTTP server."""
    route: RouteSettings = field(default_factory=RouteSettings)
    """The engines behind the router."""


def groups_of(tree: type[ConfigTree]) -> Iterator[tuple[str, type]]:
    """Name and class of each group of a tree: those that the tree itself names first, then those it inherits."""
    own = list(tree.__annotations__)
    for item in sorted(fields(tree), key=lambda item: own.index(item.name) if item.name in own else len(own)):
        if str(item.type) in _GROUPS:
            yield item.name, _GROUPS[str(item.type)]


def roles_of(tree: type[ConfigTree]) -> tuple[str, ...]:
    """The roles of engines that a tree has settings of their own for; each is the name of such a group."""
    return ROLES if issubclass(tree, UpConfig) else ()


def settings_in(tree: type[ConfigTree]) -> Iterator[tuple[str, Setting]]:
    """Group and setting, for everything that can be set in a tree, in order; last those of one role's engines."""
    left_out = _LEFT_OUT.get(tree.__name__, frozenset())
    for name, group in groups_of(tree):
        for setting in settings_of(group):
            if f"{name}.{setting.name}" not in left_out:
                yield name, setting
    for role in roles_of(tree):
        for setting in role_settings(role):
            yield role, setting


def _places(tree: type[ConfigTree]) -> dict[str, tuple[str, Setting]]:
    """Group and setting by every name that a file or a caller may use (flag, aliases, field), with dashes."""
    places: dict[str, tuple[str, Setting]] = {}
    for name, setting in settings_in(tree):
        aliases = (alias.removeprefix("--") for alias in setting.aliases)
        for key in (setting.key, *aliases, setting.name.replace("_", "-")):
            places.setdefault(key, (name, setting))
    return places


def build_tree(tree: type[_TreeT], *layers: Layer) -> _TreeT:
    """A tree from what its sources say, the strongest source first; defaults fill the rest. Raises ConfigError."""
    groups = {name: {item.name for item in settings_of(group)} for name, group in groups_of(tree)}
    groups |= {role: {item.name for item in role_settings(role)} for role in roles_of(tree)}
    defaults = tree()
    for layer in layers:
        unknown = sorted(set(layer) - set(groups))
        if unknown:
            raise ConfigError(f"config: unknown group {unknown[0]!r}, expected one of {', '.join(groups)}")
    made: dict[str, Any] = {}
    for name, known in groups.items():
        values: dict[str, Any] = {}
        for layer in reversed(layers):
            for key, value in layer.get(name, {}).items():
                if key not in known:
                    expected = ", ".join(sorted(known))
                    raise ConfigError(f"config: unknown setting {name}.{key}, expected one of {expected}")
                values[key] = tuple(value) if isinstance(value, list) else value
        made[name] = values if name in roles_of(tree) else replace(getattr(defaults, name), **values)
    return tree(**made)


def from_names(tree: type[_TreeT], values: Mapping[str, Any]) -> _TreeT:
    """A tree from Python keyword arguments: `from_names(ServeConfig, {"model_path": p, "page_size": 32})`.

    A name is the field's, the flag's or an alias's (`max_model_len`), with underscores; defaults fill the rest. Raises
    ConfigError for names that the command does not have.
    """
    places = {key.replace("-", "_"): place for key, place in _places(tree).items()}
    layer: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        if name not in places:
            near = get_close_matches(name, places, n=1)
            expected = f"perhaps {near[0]!r}" if near else f"one of {', '.join(sorted(places))}"
            raise ConfigError(f"config: unknown setting {name!r}, expected {expected}")
        _put(layer, places[name], value)
    return build_tree(tree, layer)


def _put(layer: dict[str, dict[str, Any]], place: tuple[str, Setting], value: Any) -> None:
    """What a program or a file gives for a setting; a table, for one that is JSON, as its text."""
    group, setting = place
    if KINDS[setting.kind][0] is str and isinstance(value, dict):
        try:
            value = json.dumps(value)
        except TypeError as err:
            raise ConfigError(f"config: {setting.flag} is {value!r} ({err}), expected what JSON has") from err
    layer.setdefault(group, {})[setting.name] = value


def parse_text(setting: Setting, text: str, where: str) -> Any:
    """The value that `text` (of a flag or an environment variable, `where`) stands for. Raises ConfigError."""
    kind, optional = KINDS[setting.kind]
    if optional and text.lower() in ("", "none", "null"):
        return None
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off", ""):
            return False
        raise ConfigError(f"config: {where} is {text!r}, expected true or false")
    if kind is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        expected = "an integer" if kind is int else "a number"
        raise ConfigError(f"config: {where} is {text!r}, expected {expected}") from None


def environment() -> Mapping[str, str]:
    """The process's environment, for code that needs a variable that is no setting (NUMBA_CACHE_DIR...)."""
    return os.environ


def read_environment(tree: type[ConfigTree], env: Mapping[str, str] | None = None) -> Layer:
    """What `SERINUS_*` variables say about the settings of a tree. Raises ConfigError for values of a wrong type."""
    env = environment() if env is None else env
    layer: dict[str, dict[str, Any]] = {}
    for name, setting in settings_in(tree):
        if setting.env in env:
            layer.setdefault(name, {})[setting.name] = parse_text(setting, env[setting.env], setting.env)
    return layer


def read_file(tree: type[ConfigTree], path: str) -> Layer:
    """What a settings file says: a flat table of flag names (with - or _), YAML, or TOML by its ending.

    Raises ConfigError where the file cannot be read or names a setting that the command does not have.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"config: cannot read --config {path!r} ({err}), expected a YAML or TOML file") from err
    data = _parse_file(file, text)
    if not isinstance(data, dict):
        raise ConfigError(f"config: {path} holds a {type(data).__name__}, expected a table of settings")
    by_key = _places(tree)
    layer: dict[str, dict[str, Any]] = {}
    for raw, value in data.items():
        found = by_key.get(str(raw).replace("_", "-"))
        if found is None:
            raise ConfigError(f"config: {path} sets {raw!r}, expected names of flags such as {sorted(by_key)[0]!r}")
        _put(layer, found, value)
    return layer


def _parse_file(file: Path, text: str) -> Any:
    if file.suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as err:
            raise ConfigError(f"config: {file} is no TOML: {err}") from err
    import yaml

    try:
        return yaml.safe_load(text) or {}
    except yaml.YAMLError as err:
        raise ConfigError(f"config: {file} is no YAML: {err}") from err

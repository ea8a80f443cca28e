"""Configuration: TOML into frozen dataclasses, with unknown keys refused and every section checked before device work."""

import dataclasses
import hashlib
import json
import types
import typing
from pathlib import Path
from typing import Any

from dmpo_jax.diffusion.sampler import SamplerConfig
from dmpo_jax.errors import UserError, nearest, shown
from dmpo_jax.evaluation.protocol import EvaluationConfig, check_protocol, for_evaluation, length_of, sampler_for
from dmpo_jax.model.chat import TEMPLATES
from dmpo_jax.model.checkpoint_folder import TOKENIZER_KEY, locate, model_of
from dmpo_jax.model.families import FAMILIES, SHAPE, same
from dmpo_jax.model.lora import LoraConfig
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.objectives import OBJECTIVES
from dmpo_jax.tasks.task import TaskConfig
from dmpo_jax.toml_files import parse_override, read_extended


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What a run does as a whole."""

    seed: int = 0
    cycles: int = 40
    start_from: str = ""  # run folder whose latest parameters this run starts from; "": random parameters
    samples_every: int = 10  # cycles between decoded answers in samples.jsonl; 0: none
    compilation_cache: str = "~/.cache/dmpo_jax/xla"  # folder of compiled programs; "": none
    start_timeout: int = 600  # seconds to wait for the other processes of a run
    heartbeat: int = 60  # seconds of silence after which a process counts as dead and the others end
    watchdog: float = 60.0  # minutes that a compilation, cycle, batch of an evaluation or save may take; 0: any time

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        _at_least("run.cycles", self.cycles, 1)
        if not 0 <= self.seed < 2**32:
            raise UserError(f"run.seed = {self.seed}: expected 0 to 4294967295; larger ones would repeat these")
        _at_least("run.samples_every", self.samples_every, 0)
        _at_least("run.start_timeout", self.start_timeout, 1)
        _at_least("run.heartbeat", self.heartbeat, 5)
        _at_least("run.watchdog", self.watchdog, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """`character` (digits, arithmetic and answer tags), `byte` (any text), or `pretrained`: that of model.pretrained."""

    kind: str = "character"
    template: str = ""  # chat template of prompts: "" is the family's, "none" sends them as they are
    truncation: str = (
        "refuse"  # of prompts wider than the widest bucket: refuse, or cut them "left" or "right" and say so
    )

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        if self.template and self.kind != "pretrained":
            raise UserError(
                f'tokenizer.template = "{self.template}": tokenizer {self.kind} has no chat template; leave it out'
            )
        if self.template and self.template not in TEMPLATES:
            raise UserError(f'tokenizer.template = "{self.template}": expected one of {", ".join(TEMPLATES)}')
        if self.truncation not in ("refuse", "left", "right"):
            raise UserError(f'tokenizer.truncation = "{self.truncation}": expected "refuse", "left" or "right"')


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The shape of one cycle's batch."""

    prompts: int = 16  # per cycle, over all devices (P)
    group: int = 8  # completions per prompt (N)
    completion_length: int = 20  # tokens (L)
    prompt_buckets: tuple[int, ...] = ()  # allowed prompt widths; (): one, as wide as the longest prompt
    accumulation: int = 1  # micro-batches of whole groups per update
    staleness: int = 0  # further cycles that learn from the same rollout

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        for key in ("prompts", "group", "completion_length", "accumulation"):
            _at_least(f"rollout.{key}", getattr(self, key), 1)
        _at_least("rollout.staleness", self.staleness, 0)
        if self.staleness and len(self.prompt_buckets) > 1:
            raise UserError(
                f"rollout.staleness = {self.staleness}: a rollout that is kept has one shape, but rollout.prompt_buckets "
                f"names {len(self.prompt_buckets)} widths; leave one"
            )
        tokens = self.prompts * self.group * self.completion_length
        if tokens >= 2**31:
            raise UserError(
                f"rollout.prompts x group x completion_length = {tokens:,}: expected less than 2^31 tokens a cycle; "
                "lower one of them"
            )
        if any(not 1 <= width <= 2**17 for width in self.prompt_buckets):
            raise UserError(
                f"rollout.prompt_buckets = {shown(list(self.prompt_buckets))}: expected widths of 1 to {2**17}"
            )
        if self.prompts % self.accumulation:
            raise UserError(
                f"rollout.accumulation = {self.accumulation} does not divide rollout.prompts = {self.prompts}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with a global-norm clip."""

    learning_rate: float = 5e-5
    schedule: str = "constant"  # constant | cosine (to 0 at the last update)
    warmup: int = 0  # updates
    b1: float = 0.9
    b2: float = 0.99
    weight_decay: float = 0.0
    clip: float = 0.2  # global gradient norm

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        if self.schedule not in ("constant", "cosine"):
            raise UserError(f'optimizer.schedule = "{self.schedule}": expected "constant" or "cosine"')
        if not self.learning_rate > 0:
            raise UserError(f"optimizer.learning_rate = {self.learning_rate}: expected a positive number")
        if self.weight_decay < 0:
            raise UserError(f"optimizer.weight_decay = {self.weight_decay}: expected 0 or more")
        if not self.clip > 0:
            raise UserError(f"optimizer.clip = {self.clip}: expected a positive number")
        if not (0 <= self.b1 < 1 and 0 <= self.b2 < 1):
            raise UserError(f"optimizer.b1, b2 = {self.b1}, {self.b2}: expected numbers from 0 up to, not including, 1")
        _at_least("optimizer.warmup", self.warmup, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Sizes of the mesh axes; data = 0 takes the devices that the others leave."""

    data: int = 0
    fsdp: int = 1
    model: int = 1

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        _at_least("mesh.data", self.data, 0)
        _at_least("mesh.fsdp", self.fsdp, 1)
        _at_least("mesh.model", self.model, 1)

    def shape(self, devices: int) -> tuple[int, int, int]:
        """(data, fsdp, model) on so many devices."""
        return (self.data or max(devices // (self.fsdp * self.model), 1), self.fsdp, self.model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved; the last cycle always is."""

    every: int = 10  # cycles
    keep: int = 2  # newest checkpoints that stay

    def validate(self) -> None:
        """Raises UserError on a setting out of range."""
        _at_least("checkpoint.every", self.every, 1)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl. Neither can stop a run or change its numbers."""

    tensorboard: bool = False  # event files in the run folder's tensorboard/
    wandb: str = ""  # Weights & Biases project; "": none

    def validate(self) -> None:
        """Raises UserError on a name that is none."""
        if len(self.wandb) > 128 or any(c in "/\\#?%:" or not c.isprintable() for c in self.wandb):
            raise UserError(
                f"logging.wandb = {shown(self.wandb)}: expected a project name of at most 128 characters without / \\ # ? % :"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that decides a run. Hashable, so it is static under jit."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    lora: LoraConfig = LoraConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    task: TaskConfig = TaskConfig()
    rollout: RolloutConfig = RolloutConfig()
    sampler: SamplerConfig = SamplerConfig()
    objective: Any = OBJECTIVES["dmpo"].Config()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    logging: LoggingConfig = LoggingConfig()

    def validate(self) -> None:
        """Checks every section, and the sections against each other. Raises UserError."""
        for section in (
            self.run, self.model, self.lora, self.tokenizer,
            self.task, self.rollout, self.optimizer, self.mesh, self.evaluation, self.checkpoint,
            self.logging
        ):  # fmt: skip
            section.validate()
        if self.model.family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise UserError(f'model.family = "{self.model.family}": expected one of {known}')
        self.sampler.validate(self.rollout.completion_length)
        self.sampler.validate_model(self.model)
        self._validate_evaluation()
        self.objective.validate(self.rollout.group, self.sampler)
        updates = self.run.cycles * self.objective.updates
        if self.optimizer.warmup >= max(updates, 1):
            raise UserError(
                f"optimizer.warmup = {self.optimizer.warmup}: expected less than the run's {updates} updates "
                "(run.cycles x objective.updates)"
            )
        for key, value in vars_of(self.lora).items():
            if not self.lora.rank and value != getattr(LoraConfig(), key):
                raise UserError(f"lora.{key} has no effect with lora.rank = 0; leave it out, or set lora.rank")
        if self.tokenizer.truncation != "refuse" and not self.rollout.prompt_buckets:
            raise UserError(
                f'tokenizer.truncation = "{self.tokenizer.truncation}" has no effect without rollout.prompt_buckets, as the '
                "one width is the longest prompt's; leave it out, or set the buckets"
            )

    @property
    def evaluation_sampler(self) -> SamplerConfig:
        """How evaluations decode; see `evaluation/protocol.py`."""
        length = length_of(self.evaluation, self.rollout.completion_length)
        return sampler_for(self.sampler, self.evaluation, self.model.family, length)

    def _validate_evaluation(self) -> None:
        length = length_of(self.evaluation, self.rollout.completion_length)
        check_protocol(self.evaluation, self.task, self.model, length)
        try:
            self.evaluation_sampler.validate(length)
            self.evaluation_sampler.validate_model(for_evaluation(self).model)
        except UserError as error:
            raise UserError(
                f"evaluation.temperature = {self.evaluation.temperature} in place of sampler.temperature: {error}"
            ) from None

    def validate_mesh(self, shards: int, shape: tuple[int, ...]) -> None:
        """Raises UserError unless whole groups (and evaluation rows) divide over `shards` of rows."""
        micro = self.rollout.prompts // self.rollout.accumulation
        if micro % shards:
            raise UserError(
                f"rollout.prompts = {self.rollout.prompts} in {self.rollout.accumulation} micro-batches: {micro} groups do "
                f"not divide over the {shards} row shards of mesh {shape}; use a multiple of {shards} prompts a micro-batch"
            )
        self.validate_batch(shards, shape)

    def validate_batch(self, shards: int, shape: tuple[int, ...]) -> None:
        """Raises UserError unless the rows of an evaluation divide over `shards` of rows."""
        if self.evaluation.batch % shards:
            raise UserError(
                f"evaluation.batch = {self.evaluation.batch} does not divide over the {shards} row shards of mesh {shape}"
            )

    def to_toml(self) -> str:
        """The resolved configuration as TOML text."""
        lines = []
        for name, section in vars_of(self).items():
            lines.append(f"[{name}]")
            lines += [f"{key} = {_literal(value)}" for key, value in vars_of(section).items()]
            lines.append("")
        return "\n".join(lines)

    def digest(self) -> str:
        """Hash of the resolved configuration, compared on resume and between hosts."""
        return hashlib.sha256(self.to_toml().encode()).hexdigest()[:16]


def vars_of(section) -> dict[str, Any]:
    """Fields of a dataclass by name, in order."""
    return {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise UserError(f"{key} = {value}: expected {least} or more")


def _literal(value: Any) -> str:
    text = json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # JSON may hold it as it is, TOML may not


def load_config(path: str | Path, overrides: typing.Sequence[str] = ()) -> Config:
    """Reads a TOML file, its `extends` base if it names one, and `section.key=value` overrides; validates the result."""
    return resolve(read_extended(Path(path)), overrides)


def resolve(tables: dict, overrides: typing.Sequence[str] = ()) -> Config:
    """Config of parsed TOML tables and overrides. Raises UserError naming the key that is wrong."""
    tables = {name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()}
    for text in overrides:
        section, key, value = parse_override(text)
        tables.setdefault(section, {})[key] = value
    known = {f.name: f for f in dataclasses.fields(Config)}
    if isinstance(tables.get("model"), dict):
        _take_shape(tables)
    sections = {}
    for name, table in tables.items():
        if name not in known:
            raise UserError(f"[{name}]: no such section{nearest(name, known)}")
        if not isinstance(table, dict):
            raise UserError(f"{name} = {shown(table)}: expected a section [{name}]")
        kind = _objective(table) if name == "objective" else known[name].type
        sections[name] = _build(name, kind, table)
    config = Config(**sections)
    config.validate()
    return config


def _take_shape(tables: dict) -> None:
    """Fills [model] in from the config.json of `model.pretrained`; a table with every key is a resolved one already."""
    model = tables["model"]
    source = model.get("pretrained")
    if not source or not isinstance(source, str) or {f.name for f in dataclasses.fields(ModelConfig)} <= model.keys():
        return
    found, content = model_of(locate(source, weights=False))
    for key in SHAPE:
        if key in model and not same(key, model[key], found):
            raise UserError(
                f"model.{key} = {shown(model[key])}: model.pretrained = {source} has {getattr(found, key)!r}; leave the key out"
            )
        model[key] = getattr(found, key)
    kind = content.get(TOKENIZER_KEY, "pretrained")
    if not isinstance(kind, str):
        raise UserError(f"{source}/config.json: {TOKENIZER_KEY} = {shown(kind)}: expected the name of a tokenizer")
    if isinstance(tables.setdefault("tokenizer", {}), dict):
        tables["tokenizer"].setdefault("kind", kind)


def _objective(table: dict) -> type:
    name = table.get("name", "dmpo")
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise UserError(
            f"objective.name = {shown(name)}: expected one of {', '.join(OBJECTIVES)}{nearest(shown(name), OBJECTIVES)}"
        )
    return OBJECTIVES[name].Config


def _build(section: str, kind: type, table: dict):
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise UserError(f"{section}.{key}: no such key{nearest(key, fields)}")
        values[key] = _typed(f"{section}.{key}", value, fields[key].type)
    return kind(**values)


def _typed(key: str, value: Any, kind: Any) -> Any:
    if isinstance(kind, types.GenericAlias):  # tuple[int, ...]
        item = typing.get_args(kind)[0]
        if not isinstance(value, list):
            raise UserError(f"{key} = {shown(value)}: expected a list of {item.__name__}")
        return tuple(_typed(key, v, item) for v in value)
    if type(value) in (int, float) and not abs(value) < 2**63:
        raise UserError(f"{key} = {shown(value)}: expected a finite number of ordinary size")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"{key} = {shown(value)}: expected {kind.__name__}, found {type(value).__name__}")
    return value

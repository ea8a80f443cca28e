"""How a completion is decoded: the settings of every sampler, and which of them go together."""

import dataclasses

from dmpo_jax.diffusion.selection import COMMIT_RULES, SCHEDULES
from dmpo_jax.errors import UserError
from dmpo_jax.model.parameters import ModelConfig

ALGORITHMS = ("low_confidence", "random", "roar", "margin", "entropy", "left_to_right", "origin", "wino")
RANKED = ("low_confidence", "margin", "entropy", "left_to_right")  # their order follows from the logits alone
CACHES = ("none", "prefix", "dual", "block")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """How a completion is decoded, block after block.

    `algorithm` ranks the masked positions of a block. low_confidence: the surest proposal first (LLaDA, maskgit_plus).
    margin, entropy: by the lead of the best token, by low entropy (Dream). random: uniformly. left_to_right. roar: one
    position per forward in a random order drawn per block; its `log_prob` sums to the exact log-probability of the
    completion given that order. origin: every position by itself, at random, by the noise schedule (Dream). wino: commits
    widely and takes back what no longer holds.
    `commit` says how many of them: as the schedule says, or as `level` allows (see `selection.COMMIT_RULES`).
    `cache` says what a forward recomputes. none: everything. prefix: the block and what follows. dual: the block. Both
    see the rest as at the block's first forward. block: the block, exactly, for a model with `block_size` (SDAR).
    """

    algorithm: str = "low_confidence"
    steps: int = 0  # denoising steps of the whole completion; 0: one per token
    block_length: int = 0  # tokens decoded together, left to right by blocks; 0: the whole completion
    temperature: float = 0.0  # of the proposal; 0: the most probable token
    stop_at_eos: bool = True  # a row whose finished block holds the end-of-sequence token is done
    top_k: int = 0  # propose among the k most probable tokens; 0: all
    top_p: float = 1.0  # propose among the smallest set of tokens whose mass exceeds this
    commit: str = "schedule"
    level: float = 0.0  # the number of the commit rule: a probability, factor, margin or bound in nats
    schedule: str = "even"  # even | rounded (dllm) | dream
    confidence: str = (
        "plain"  # distribution that ranks: plain, tempered, or filtered (tempered and cut to top_k, top_p)
    )
    rank_temperature: float = 0.0  # above 0: draw the positions from softmax(score / this) (Dream's alg_temp)
    cfg_scale: float = 0.0  # classifier-free guidance w: logits u + (w + 1) (c - u), u with the prompt masked
    eos: str = "plain"  # forbid: never proposed. last: a position that proposes it comes after all others
    cache: str = "none"
    vicinity: int = 0  # tokens on either side of the block that a dual cache recomputes with it
    suffix_window: int = 0  # tokens after the block that are seen, besides the last; 0: all (Streaming-dLLM)
    level_decay: float = 0.0  # a: level x (1 - a (1 - masked share of block and window)) (Streaming-dLLM)
    drafts: int = 0  # steps guessed ahead and checked in one forward; the same text in fewer forwards (FreeDave)
    revoke: float = 0.0  # wino: a committed token less probable than this is masked again
    trace_entropy: bool = False  # whether the trace holds entropies

    def schedule_of(self, length: int) -> list[int]:
        """Tokens to commit at each step of a block; steps that commit nothing are left out, except under origin."""
        block = self.block_length or length
        steps = (self.steps or length) // (length // block)
        counts = SCHEDULES[self.schedule](block, steps)
        return counts if self.algorithm == "origin" else [count for count in counts if count]

    def validate(self, length: int) -> None:
        """Raises UserError when completions of `length` tokens cannot be decoded this way, or a setting has no effect."""
        _one_of("algorithm", self.algorithm, ALGORITHMS)
        _one_of("commit", self.commit, COMMIT_RULES)
        _one_of("schedule", self.schedule, SCHEDULES)
        _one_of("confidence", self.confidence, ("plain", "tempered", "filtered"))
        _one_of("eos", self.eos, ("plain", "forbid", "last"))
        _one_of("cache", self.cache, CACHES)
        self._validate_steps(length)
        for key in ("temperature", "top_k", "rank_temperature", "cfg_scale", "vicinity", "suffix_window", "drafts"):
            if getattr(self, key) < 0:
                raise UserError(f"sampler.{key} = {getattr(self, key)}: expected 0 or more")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampler.top_p = {self.top_p}: expected above 0 and at most 1 (1: no limit)")
        for key in ("revoke", "level_decay"):
            if not 0 <= getattr(self, key) < 1:
                raise UserError(f"sampler.{key} = {getattr(self, key)}: expected 0 or more, below 1")
        self._validate_pairs()

    def _validate_steps(self, length: int) -> None:
        block = self.block_length or length
        if not 0 < block <= length or length % block:
            raise UserError(
                f"sampler.block_length = {self.block_length} does not divide rollout.completion_length = {length}"
            )
        blocks, steps = length // block, self.steps or length
        if steps % blocks or not blocks <= steps <= length:
            raise UserError(
                f"sampler.steps = {self.steps}: expected a multiple of the {blocks} blocks from {blocks} to {length}"
            )
        if self.algorithm == "roar" and steps != length:
            raise UserError(
                f"sampler.steps = {self.steps}: roar decodes one token per forward, so steps must be {length} (or 0)"
            )
        if self.steps and not self._scheduled:
            raise UserError(
                f"sampler.steps = {self.steps} has no effect: {self._commits_by} decides how many tokens a step commits; "
                "leave steps out"
            )

    @property
    def _scheduled(self) -> bool:
        return self.commit in ("schedule", "dynamic") and self.algorithm != "wino"

    @property
    def _commits_by(self) -> str:
        return "wino" if self.algorithm == "wino" else f'sampler.commit = "{self.commit}"'

    def _validate_pairs(self) -> None:
        ranked, greedy = self.algorithm in RANKED, self.temperature == 0
        leveled = self.commit != "schedule" or self.algorithm == "wino"
        entropic = self.commit in ("entropy_bound", "entropy_sum")
        own = f'sampler.algorithm = "{self.algorithm}"'
        rules = (
            ("commit", ranked or self.algorithm == "random", f"{own} decides by itself what it commits"),
            ("commit", not entropic or self.algorithm == "entropy", 'it needs sampler.algorithm = "entropy"'),
            ("commit", self.commit != "run" or self.algorithm == "left_to_right", 'it needs algorithm = "left_to_right"'),
            ("level", leveled, "a fixed schedule has none; set sampler.commit"),
            ("schedule", self._scheduled and self.algorithm != "origin", f"{self._commits_by} has no schedule of its own"),
            ("schedule", self.algorithm != "roar", "roar decodes one token per forward"),
            ("top_k", not greedy, "greedy proposals need no filter; set sampler.temperature"),
            ("top_p", not greedy, "greedy proposals need no filter; set sampler.temperature"),
            ("confidence", not greedy, "it differs at a temperature above 0 only; set sampler.temperature"),
            ("confidence", self.confidence != "filtered" or self._filters, "there is no filter; set sampler.top_k or top_p"),
            ("confidence", ranked or leveled, f"{own} does not rank by confidence"),
            ("rank_temperature", ranked and self.commit == "schedule", "it draws positions of a ranked, scheduled sampler"),
            ("eos", self.eos != "last" or self.algorithm in RANKED[:3], f"{own} does not rank by confidence"),
            ("vicinity", self.cache == "dual", 'it needs sampler.cache = "dual"'),
            ("suffix_window", self.cache == "prefix", 'it needs sampler.cache = "prefix"'),
            ("level_decay", self.commit == "threshold", 'it needs sampler.commit = "threshold"'),
            ("drafts", ranked and self.commit == "schedule" and greedy, "they need a ranked schedule at temperature 0"),
            ("drafts", self.cache != "none", "drafts are checked against a cache; set sampler.cache"),
            ("drafts", not self.cfg_scale and not self.rank_temperature, "drafts go with neither guidance nor random ranks"),
            ("revoke", self.algorithm == "wino", 'it needs sampler.algorithm = "wino"'),
            ("cache", self.algorithm != "roar", "roar's log-probabilities are exact only without a cache"),
            ("cache", self.algorithm != "wino", "wino checks against fresh states only"),
            ("cfg_scale", self.algorithm != "wino", "wino goes without guidance"),
        )  # fmt: skip
        for key, allowed, needs in rules:
            if getattr(self, key) != _DEFAULTS[key] and not allowed:
                raise UserError(f"sampler.{key} = {_shown(getattr(self, key))}: {needs}, or leave {key} out")
        if leveled and not self.level > 0:
            raise UserError(f"sampler.level = {self.level}: {self._commits_by} needs it, above 0")

    @property
    def _filters(self) -> bool:
        return self.top_k > 0 or self.top_p < 1

    def validate_model(self, model: ModelConfig) -> None:
        """Raises UserError when this family of models cannot be decoded this way."""
        if model.block_size and self.block_length != model.block_size:
            raise UserError(
                f"sampler.block_length = {self.block_length}: this model was made for blocks of model.block_size = "
                f"{model.block_size}; set block_length to that"
            )
        for key, wrong, needs in (
            ("cache", self.cache == "block" and not model.block_size, "needs a model with model.block_size (SDAR)"),
            ("cache", self.cache in ("prefix", "dual") and model.block_size, 'such a cache is exact here: use "block"'),
            ("algorithm", self.algorithm in ("roar", "wino") and model.block_size, "needs attention to all blocks"),
            ("algorithm", self.algorithm == "wino" and model.logits_shift, "needs a head that scores its own position"),
            ("cfg_scale", self.cfg_scale and model.block_size, "guidance masks a prompt of its own length"),
        ):
            if wrong:
                raise UserError(
                    f"sampler.{key} = {_shown(getattr(self, key))}: {needs}, but model.family = {model.family}"
                )
        if model.attend_to_padding and (model.block_size or model.logits_shift):
            raise UserError(f"model.attend_to_padding: published for LLaDA only, but model.family = {model.family}")


_DEFAULTS = {field.name: field.default for field in dataclasses.fields(SamplerConfig)}


def _shown(value) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _one_of(key: str, value: str, known) -> None:
    if value not in known:
        raise UserError(f'sampler.{key} = "{value}": expected one of {", ".join(known)}')

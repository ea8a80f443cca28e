"""What a configuration stands for once resolved: the tokenizer, the task and the model's final shape."""

import dataclasses
import functools

from dmpo_jax.config import Config
from dmpo_jax.errors import UserError
from dmpo_jax.model.checkpoint_folder import locate
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.model.pretrained_tokenizer import PretrainedTokenizer, load_tokenizer
from dmpo_jax.model.tokenizer import Tokenizer, make_tokenizer
from dmpo_jax.objectives import OBJECTIVES
from dmpo_jax.objectives.objective import Context
from dmpo_jax.tasks import get_task
from dmpo_jax.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class Setup:
    """Static surroundings of every program of a run."""

    config: Config
    tokenizer: Tokenizer | PretrainedTokenizer
    task: Task
    teacher: ModelConfig | None = None  # of the objective's teacher, where it has one

    @functools.cached_property
    def model(self) -> ModelConfig:
        """The model with its vocabulary size filled in."""
        size = self.config.model.vocab_size or self.tokenizer.vocab_size
        return dataclasses.replace(self.config.model, vocab_size=size)

    @property
    def objective(self):
        """The objective's module."""
        return OBJECTIVES[self.config.objective.name]

    @property
    def context(self) -> Context:
        """What the objective's functions need to know."""
        return Context(
            model=self.model,
            reference_model=self.teacher or self.model,
            mask_id=self.tokenizer.mask_id,
            eos_id=self.tokenizer.eos_id,
            sampler=self.config.sampler,
        )


def make_setup(config: Config) -> Setup:
    """Resolves names. Raises UserError where the model's vocabulary and the tokenizer disagree."""
    kind, source = config.tokenizer.kind, config.model.pretrained
    if kind == "pretrained" and not source:
        raise UserError('tokenizer.kind = "pretrained" needs model.pretrained, the folder that holds it')
    pretrained = kind == "pretrained"
    tokenizer = load_tokenizer(locate(source), config.tokenizer.template) if pretrained else make_tokenizer(kind)
    if 0 < config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size = {config.model.vocab_size}, but tokenizer {tokenizer.kind} has "
            f"{tokenizer.vocab_size} tokens; leave it out, or set that many or more (the rest are unused rows)"
        )
    return Setup(config, tokenizer, get_task(config.task.name, config.task))

"""How a policy is evaluated: what is asked, how it is decoded, and what is counted.

`strict`: the prompt of training, `[sampler]` at `evaluation.temperature`, and the task's own grader: the last answer, exact
solves, sudoku by its rules. With `evaluation.samples` above 1, pass@k and the variety of the answers.

`published`: what the d1 family does (d1, wd1, SPG, ESPO, DMPO). Another prompt than in training where it has one; the answer
begun for the model with `<reasoning>`; on LLaDA greedy low-confidence decoding in blocks of 32, to the last token, with
prompts padded on the left and pads attended; on Dream entropy order over the whole completion at temperature 0.2 and top-p
0.95. `evaluation.tokens_per_step` says how many tokens a step commits: 2 in d1, wd1, SPG and ESPO, 1 in DMPO. `accuracy` is
what their parser counts; sudoku's cells are pooled.

Either way every answer gets both verdicts.
"""

import dataclasses
from typing import Any

from dmpo_jax.diffusion.sampler_config import SamplerConfig
from dmpo_jax.errors import UserError
from dmpo_jax.model.parameters import ModelConfig
from dmpo_jax.tasks.task import PROMPTS, TaskConfig

PROTOCOLS = ("strict", "published")
PUBLISHED_PROMPTS = ("published_evaluation", "published")  # the first that a task has is what the d1 family asks
PREFILL = "<reasoning>"
BLOCK = 32
PUBLISHED_SAMPLERS = {
    "llada": {"block_length": BLOCK},
    "dream": {
        "algorithm": "entropy", "temperature": 0.2, "top_p": 0.95, "confidence": "filtered", "schedule": "dream"
    },
}  # fmt: skip
MAX_SAMPLES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the policy is evaluated. It decodes with `sampler`, except for these."""

    every: int = 0  # cycles between validations; 0: only before the first and after the last
    batch: int = 64  # prompts decoded together, over all devices
    temperature: float = 0.0
    test: bool = True  # evaluate the test split with the first and the selected parameters
    select: str = "last"  # parameters that are a run's result: the last ones, or the "best" of all validations
    protocol: str = "strict"  # strict, or published: as the d1 family asks, decodes and counts
    tokens_per_step: int = 0  # of the published protocol: 2 (d1, wd1, SPG, ESPO) or 1 (DMPO)
    samples: int = 1  # answers to each question, for pass@k; several need a temperature
    completion_length: int = 0  # tokens of an answer; 0: as many as in rollouts

    def validate(self) -> None:
        """Raises UserError on a setting out of range, or on one that another makes meaningless."""
        for key, least in (("every", 0), ("batch", 1), ("samples", 1), ("completion_length", 0)):
            if getattr(self, key) < least:
                raise UserError(f"evaluation.{key} = {getattr(self, key)}: expected {least} or more")
        if self.temperature < 0:
            raise UserError(f"evaluation.temperature = {self.temperature}: expected 0 (greedy) or more")
        if self.select not in ("last", "best"):
            raise UserError(f"evaluation.select = {self.select!r}: expected last or best")
        if self.samples > MAX_SAMPLES:
            raise UserError(f"evaluation.samples = {self.samples}: expected at most {MAX_SAMPLES}")
        if self.protocol not in PROTOCOLS:
            raise UserError(f'evaluation.protocol = "{self.protocol}": expected one of {", ".join(PROTOCOLS)}')
        if self.protocol == "strict":
            if self.tokens_per_step:
                raise UserError(
                    f"evaluation.tokens_per_step = {self.tokens_per_step}: it belongs to evaluation.protocol = "
                    '"published"; set sampler.steps instead'
                )
            if self.samples > 1 and not self.temperature:
                raise UserError(
                    f"evaluation.samples = {self.samples}: greedy answers are all the same; set evaluation.temperature above 0"
                )
            return
        if self.tokens_per_step not in (1, 2):
            raise UserError(
                f'evaluation.tokens_per_step = {self.tokens_per_step}: evaluation.protocol = "published" needs 2 (steps = '
                "half the length, as d1, wd1, SPG and ESPO) or 1 (as DMPO)"
            )
        for key, usual in (("temperature", 0.0), ("samples", 1)):
            if getattr(self, key) != usual:
                raise UserError(
                    f'evaluation.{key} = {getattr(self, key)}: evaluation.protocol = "published" decides it; leave it out'
                )


def check_protocol(evaluation: EvaluationConfig, task: TaskConfig, model: ModelConfig, length: int) -> None:
    """Raises UserError where the published protocol knows neither the task nor the model, or not this completion length."""
    if evaluation.protocol != "published":
        return
    said = 'evaluation.protocol = "published"'
    if not any(prompt in PROMPTS[task.name] for prompt in PUBLISHED_PROMPTS):
        known = [name for name in PROMPTS if any(prompt in PROMPTS[name] for prompt in PUBLISHED_PROMPTS)]
        raise UserError(
            f'{said}: not published for task.name = "{task.name}", but for {", ".join(known)}; set "strict"'
        )
    if model.family not in PUBLISHED_SAMPLERS or model.block_size:
        known = ", ".join(PUBLISHED_SAMPLERS)
        raise UserError(f'{said}: not published for model.family = "{model.family}", but for {known}; set "strict"')
    if length % BLOCK:
        raise UserError(
            f"{said}: completions of {length} tokens are no multiple of its blocks of {BLOCK}; set "
            "evaluation.completion_length to 128, 256 or 512"
        )


def sampler_for(sampler: SamplerConfig, evaluation: EvaluationConfig, family: str, length: int) -> SamplerConfig:
    """How an evaluation decodes completions of `length` tokens.

    Strict: `sampler` at the evaluation's temperature; greedy, it drops what shapes random proposals alone; several samples are
    traced with their entropies.
    """
    if evaluation.protocol == "published":
        steps = length // evaluation.tokens_per_step
        return SamplerConfig(steps=steps, stop_at_eos=False, **PUBLISHED_SAMPLERS[family])
    unused = {} if evaluation.temperature else {"top_k": 0, "top_p": 1.0, "confidence": "plain"}
    traced = {"trace_entropy": True} if evaluation.samples > 1 else {}
    return dataclasses.replace(sampler, temperature=evaluation.temperature, **unused, **traced)


def model_for(model: ModelConfig, evaluation: EvaluationConfig) -> ModelConfig:
    """The model as an evaluation runs it: the published one attends to pads on LLaDA."""
    attends = evaluation.protocol == "published" and model.family == "llada"
    return dataclasses.replace(model, attend_to_padding=True) if attends else model


def task_for(task: TaskConfig, evaluation: EvaluationConfig) -> TaskConfig:
    """The task as an evaluation asks it: the published prompt where the task has one."""
    if evaluation.protocol != "published":
        return task
    prompt = next((prompt for prompt in PUBLISHED_PROMPTS if prompt in PROMPTS[task.name]), task.prompt)
    return dataclasses.replace(task, prompt=prompt)


def for_evaluation(config: Any) -> Any:
    """A `Config` with the model, the task and the completion length of its evaluations."""
    model, task = model_for(config.model, config.evaluation), task_for(config.task, config.evaluation)
    length = length_of(config.evaluation, config.rollout.completion_length)
    return dataclasses.replace(
        config, model=model, task=task, rollout=dataclasses.replace(config.rollout, completion_length=length)
    )


def length_of(evaluation: EvaluationConfig, rollout_length: int) -> int:
    """Tokens of an answer in an evaluation."""
    return evaluation.completion_length or rollout_length


def prefill_for(evaluation: EvaluationConfig) -> str:
    """How the answer is begun for the model, after the prompt."""
    return PREFILL if evaluation.protocol == "published" else ""


def counted(evaluation: EvaluationConfig, reward: str, figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of an evaluation, with `accuracy` and `exact` as its protocol counts.

    `figures` are those of the task's `summarize` and of `verdicts.compared`, which has none where the task lacks a published
    rule. Under the reward "published" the task's own figures count by that, which strict does not.
    """
    if evaluation.protocol == "published" and "published" in figures:
        return figures | {"accuracy": figures["published"]["accuracy"]}
    if reward == "published" and "strict" in figures:
        right = figures["strict"]["accuracy"]
        return figures | {"accuracy": right, "exact": right}
    return figures

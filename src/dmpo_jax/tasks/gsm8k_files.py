"""GSM8K as published: questions with worked answers that end in `#### N`.

- JSON lines `{"question": "...", "answer": "...\\n#### 18"}` (other keys are ignored; an answer may be the number alone)
- CSV with the columns `question` and `answer`, quoted where they hold line breaks
"""

from typing import Any

from dmpo_jax.tasks import question_files
from dmpo_jax.tasks.question_files import Form, Item, text_of

SOURCE = (
    "train.jsonl and test.jsonl are at https://github.com/openai/grade-school-math, "
    "in grade_school_math/data (MIT licence)"
)


def read_items(path: str) -> list[tuple[int, Item]]:
    """Read (line number, item) of each question. Raises `UserError` naming a line that is wrong."""
    return question_files.read_items(path, _FORM)


def _item(row: dict[str, Any]) -> Item | None:
    question, answer = row.get("question"), text_of(row, "answer")
    if not isinstance(question, str) or text_of(row, "question") is None or answer is None:
        return None
    solution, _, truth = answer.rpartition("####")
    return Item(question.strip(), solution.strip(), truth.strip())


_FORM = Form('{"question": "...", "answer": "... #### 18"}', SOURCE, ("question", "answer"), _item)

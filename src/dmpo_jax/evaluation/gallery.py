"""Questions and answers of a run as HTML; every character of them is treated as hostile."""

import html
import re
from typing import Any

from dmpo_jax.evaluation.run_folder import RunFolder, number

MAX_CHARACTERS = 1500
MAX_CARDS = 6
_PUZZLE = re.compile(r"(?<![0-9])[0-4]{4}(?: ?[0-4]{4}){3}(?![0-9])")


def visible(value: object, limit: int = MAX_CHARACTERS) -> str:
    """`value` as text safe inside HTML, with non-printable characters spelled out and long text cut."""
    text = value if isinstance(value, str) else repr(value)
    shown = "".join(html.escape(c) if c.isprintable() or c == "\n" else _spelled(c) for c in text[:limit])
    if len(text) > limit:
        shown += f'<span class="odd">[{len(text) - limit} more characters]</span>'
    return shown


def _spelled(character: str) -> str:
    code = ord(character)
    name = f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return f'<span class="odd">{name}</span>'


def puzzle_cells(text: object) -> str | None:
    """The last 16 digits 0-4 in a prompt or a solution, with or without a space between rows; 0 is blank."""
    found = _PUZZLE.findall(text) if isinstance(text, str) else []
    return found[-1].replace(" ", "") if found else None


def answer_cells(completion: object) -> str | None:
    """The 16 characters of the last `<answer>` block (or of the whole text without one), or None."""
    if not isinstance(completion, str):
        return None
    end = completion.rfind("</answer>")
    start = completion.rfind("<answer>", 0, end) if end >= 0 else -1
    inner = completion[start + len("<answer>") : end] if start >= 0 else completion
    cells = "".join(inner[:200].split())
    return cells if len(cells) == 16 and len(inner) <= 200 else None


def sudoku_grid(puzzle: str, cells: str, solution: str, solved: bool = False) -> str:
    """A 4x4 table: clues bold, other cells marked right or wrong by sign, shape and colour.

    `solved` marks every cell right: an answer may be valid without being the stored solution.
    """
    rows, right = [], 0
    for row in range(4):
        tds = []
        for i in range(4 * row, 4 * row + 4):
            good = solved or cells[i] == solution[i]
            if puzzle[i] != "0" and good:
                tds.append(f'<td class="clue"><b>{visible(cells[i])}</b></td>')
                continue
            right += good and puzzle[i] == "0"
            kind, sign, word = ("right", "✓", "right") if good else ("wrong", "×", "wrong")
            mark = f'<span class="mark" role="img" aria-label="{word}">{sign}</span>'
            tds.append(f'<td class="{kind}">{visible(cells[i])}{mark}</td>')
        rows.append(f"<tr>{''.join(tds)}</tr>")
    blanks = puzzle.count("0")
    return (
        f'<table class="grid"><tbody>{"".join(rows)}</tbody></table>'
        f'<p class="small">{right} of {blanks} blanks right</p>'
    )


def _answer(item: dict[str, Any], label: str) -> str:
    puzzle, solution = puzzle_cells(item.get("prompt")), puzzle_cells(item.get("truth"))
    cells = answer_cells(item.get("completion"))
    if puzzle and solution and cells:
        body = sudoku_grid(puzzle, cells, solution, solved=bool(item.get("exact")))
    else:
        body = f"<pre>{visible(item.get('completion', ''))}</pre>"
        if puzzle and solution:
            body += '<p class="small">no grid of 16 cells in this answer</p>'
    name = "score" if "score" in item else "reward"
    value = number(item.get(name))
    score = "" if value is None else f" <span class='small'>{name} {value:.3g}</span>"
    return f'<div class="answer"><h4>{html.escape(label)}{score}</h4>{body}</div>'


def card(title: str, answers: list[tuple[str, dict[str, Any]]]) -> str:
    """One question with its labelled answers side by side; all items share the first one's question."""
    item = answers[0][1]
    puzzle, solution = puzzle_cells(item.get("prompt")), puzzle_cells(item.get("truth"))
    if puzzle and solution:
        question = ""
    else:
        question = f"<pre>{visible(item.get('prompt', ''))}</pre>"
        if "truth" in item:
            question += f'<p class="small">expected: <code>{visible(item["truth"], 300)}</code></p>'
    shown = "".join(_answer(answer, label) for label, answer in answers)
    return f'<div class="card"><h3>{html.escape(title)}</h3>{question}<div class="answers">{shown}</div></div>'


def gallery(run: RunFolder) -> str:
    """A few questions of a run: test items before and after, else answers of its first and last cycle."""
    before, after = run.before_items, run.after_items
    cards: list[str] = []
    if before or after:
        total = max(len(before), len(after))
        chosen = _evenly(total)
        for i in chosen:
            pair = [(label, items[i]) for label, items in (("before", before), ("after", after)) if i < len(items)]
            if len(pair) == 2 and pair[0][1].get("prompt") != pair[1][1].get("prompt"):
                cards += [card(f"test item {i + 1}", [one]) for one in pair]
            else:
                cards.append(card(f"test item {i + 1}", pair))
        note = f"{len(chosen)} of {total} test items, evenly spaced, not picked by result."
    else:
        cycles = [run.first_samples, run.last_samples]
        if not run.first_samples:
            return ""
        if run.first_samples[0].get("cycle") == run.last_samples[0].get("cycle"):
            cycles = cycles[:1]
        for samples in cycles:
            cycle = number(samples[0].get("cycle"))
            for i in _evenly(len(samples), MAX_CARDS // 2):
                title = "training answer" if cycle is None else f"training answer, cycle {cycle:.0f}"
                cards.append(card(title, [("sampled", samples[i])]))
        note = "No test answers on file: these are training answers of the first and last cycle on file."
    if any('class="grid"' in shown for shown in cards):
        note += " Bold: given; ✓: right; × in a dashed box: wrong."
    return f'<p class="small">{note}</p><div class="cards">{"".join(cards)}</div>'


def _evenly(total: int, most: int = MAX_CARDS) -> list[int]:
    count = min(total, most)
    return [i * total // count for i in range(count)]

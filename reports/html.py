"""report.html, a run on one page: `python diagnose.py --report RUN_DIR`.

Figures, and sampled responses with their tokens coloured by advantage or by value. The page holds
everything itself and loads nothing, so it can be mailed and opened anywhere.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from files import config_of, file_of, part_of, read_rows, token_texts
from reports.embedded_task import first_wrong_token

LEVELS = 8  # shades of a colour
HEAD, TAIL = 1000, 2000  # tokens shown of a long response
EACH = 2  # right and wrong responses shown of a step
CHANGES = {  # rows of the first table: metrics at the first and the last step
    "held-out accuracy": "eval/accuracy",
    "reward of sampled responses": "rollout/reward_mean",
    "response length (tokens)": "rollout/response_length_mean",
    "truncated share": "rollout/truncated_share",
    "groups without signal (share)": "rollout/zero_variance_share",
    "policy entropy (nats per token)": "policy/entropy",
    "explained variance of the outcome": "critic/explained_variance",
    "AUC of V at the last token, within groups": "critic/end_auc",
}
# Responses are a model's text and may hold tags: all that is filled in is escaped, and the policy
# below lets the page load nothing.
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>$title</title>
<style>
:root { color-scheme: light dark; --line: #8886; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; border-radius: 4px; }
figure { margin: 0 0 1.5rem; }
table { border-collapse: collapse; }
td, th { padding: .15rem .8rem; border-bottom: 1px solid var(--line); text-align: right; }
td:first-child, th:first-child { text-align: left; padding-left: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 1rem; line-height: 1.7;
 padding: .5rem .7rem; border: 1px solid var(--line); border-radius: 4px; }
pre i { font-style: normal; border-radius: 2px; }
pre i.wrong { outline: 2px solid #d33; outline-offset: -1px; }
#legend { position: sticky; top: 0; background: Canvas; padding: .5rem 0; z-index: 1;
 border-bottom: 1px solid var(--line); }
#legend label { margin-right: 1rem; }
#legend i { font-style: normal; padding: .1rem .35rem; }
.key { display: none; }
.a .key.of-a, .v .key.of-v { display: inline; }
$shades
</style>
</head>
<body class="a">
<h1>$title</h1>
<p>$about</p>
<table><tr><th></th><th>first</th><th>last</th></tr>$changes</table>
<details><summary>Configuration</summary><pre>$config</pre></details>
<h2>Figures</h2>
$figures
<h2>Sampled responses</h2>
$samples
<script>
for (const button of document.querySelectorAll("#legend input"))
  button.addEventListener("change", () => { document.body.className = button.value; });
</script>
</body>
</html>
""")


def write_report(run: Path, figures: Sequence[Path]) -> Path:
    """Write RUN_DIR/report.html with the given PNG files in it; returns its path."""
    config = config_of(run)
    metrics = list(read_rows(file_of(run, "metrics.jsonl")))
    groups = chosen_groups(run)
    scale = advantage_scale(groups)
    tokenizer = tokenizer_of(run, config["model"]) if groups else None
    samples = "".join(group_html(group, tokenizer, scale) for group in groups)
    page = PAGE.substitute(
        title=escape(f"Run {run.resolve().name}"),
        about=escape(
            f"{config['algorithm']}, {metrics[-1]['step'] if metrics else 0} of {config['steps']} "
            f"steps, model {config['model']}, data {config['data']}, seed {config['seed']}."
        ),
        changes=changes_html(metrics),
        config=escape(json.dumps(config, indent=2)),
        figures="".join(map(figure_html, figures)),
        samples=legend_html(groups, scale) + samples,
        shades=shades_css(),
    )
    file = run / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def changes_html(metrics: Sequence[dict]) -> str:
    """Table rows: the first and the last value of each metric of CHANGES that was logged."""
    rows = []
    for title, key in CHANGES.items():
        seen = [row[key] for row in metrics if row.get(key) is not None]
        if seen:
            rows.append(f"<tr><td>{title}</td><td>{seen[0]:.3f}</td><td>{seen[-1]:.3f}</td></tr>\n")
    return "".join(rows)


def figure_html(file: Path) -> str:
    """A PNG inside the page."""
    data = base64.b64encode(file.read_bytes()).decode()
    name = escape(file.stem)
    return f'<figure><img alt="{name}" src="data:image/png;base64,{data}"></figure>\n'


# ---- samples


def chosen_groups(run: Path) -> list[list[dict]]:
    """Of the first, middle and last step with advantages: up to two right and two wrong responses
    to the first problem of the step.
    """
    # Two passes, since all rows of a long run (ids, log-probs, advantages) may not fit in memory.
    steps = sorted({row["step"] for row in rows_with_advantages(run)})
    if not steps:
        return []
    groups: dict[int, list[dict]] = {s: [] for s in (steps[0], steps[len(steps) // 2], steps[-1])}
    for row in rows_with_advantages(run):
        group = groups.get(row["step"])
        if group is not None and (not group or group[0]["problem_id"] == row["problem_id"]):
            if sum(other["reward"] == row["reward"] for other in group) < EACH:
                group.append(row)
    return list(groups.values())


def rows_with_advantages(run: Path) -> Iterator[dict]:
    """Logged responses that were trained on; dropped groups have no advantages."""
    return (row for row in read_rows(run / "rollouts.jsonl") if row.get("advantages"))


def advantage_scale(groups: Sequence[Sequence[dict]]) -> float:
    """The |A| of the strongest colour: 98 % of the tokens shown are below it, so a few outliers do
    not make all others pale.
    """
    sizes = sorted(abs(a) for group in groups for row in group for a in row["advantages"])
    return (sizes[int(0.98 * (len(sizes) - 1))] if sizes else 0) or 1.0


def tokenizer_of(run: Path, model: str) -> Any:
    """The tokenizer of the run's newest checkpoint, or of its start model."""
    from problems import load_tokenizer  # here: it imports transformers, which takes seconds

    policy = part_of(str(run), "policy")
    return load_tokenizer(model if policy == str(run) else policy)


def group_html(group: Sequence[dict], tokenizer: Any, scale: float) -> str:
    """Prompt and responses of one group."""
    title = escape(f"Step {group[0]['step']}, problem {group[0]['problem_id']}")
    responses = "".join(
        response_html(row, token_texts(tokenizer, row["response_ids"]), scale) for row in group
    )
    return f"<h3>{title}</h3>\n<pre>{escape(group[0]['prompt'])}</pre>\n{responses}"


def response_html(row: dict, texts: Sequence[str], scale: float) -> str:
    """One response: a line about it, and its tokens."""
    verdict = "right" if row["reward"] > 0.5 else "wrong"
    about = (
        f"Sample {row['sample_index']}: {verdict} ({row['reason']}), "
        f"{row['response_length']} tokens, finish reason {row['finish_reason']}, "
        f"overlong penalty {row['overlong_penalty']:.2f}"
    )
    wrong = first_wrong_token(row)
    values = row.get("values") or [None] * len(texts)
    tokens = [
        token_html(text, a, v, scale, i == wrong)
        for i, (text, a, v) in enumerate(zip(texts, row["advantages"], values, strict=True))
    ]
    if len(tokens) > HEAD + TAIL:
        tokens[HEAD:-TAIL] = [f"\n\n[{len(tokens) - HEAD - TAIL} tokens left out]\n\n"]
    return f"<div>{escape(about)}</div>\n<pre>{''.join(tokens)}</pre>\n"


def token_html(text: str, a: float, v: float | None, scale: float, wrong: bool) -> str:
    """A token with its shades as classes and its numbers as a tooltip."""
    shade = min(LEVELS, round(abs(a) / scale * LEVELS))
    names, title = [f"{'p' if a > 0 else 'n'}{shade}"], f"A {a:+.3f}"
    if v is not None:
        names.append(f"v{round(min(max(v, 0), 1) * LEVELS)}")
        title += f", V {v:.3f}"
    names += ["wrong"] if wrong else []
    return f'<i class="{" ".join(names)}" title="{title}">{escape(text)}</i>'


def shades_css() -> str:
    """CSS: blue for A above 0, orange below, green for V. Transparent, so that they suit a light
    page and a dark one.
    """
    colours = {"a .p": "40, 120, 255", "a .n": "255, 120, 0", "v .v": "0, 165, 90"}
    return "\n".join(
        f".{name}{level} {{ background: rgba({rgb}, {0.7 * level / LEVELS:.3f}); }}"
        for name, rgb in colours.items()
        for level in range(1, LEVELS + 1)
    )


def legend_html(groups: Sequence[Sequence[dict]], scale: float) -> str:
    """The switch and the meaning of the colours."""
    rows = [row for group in groups for row in group]
    if not rows:
        return "<p>rollouts.jsonl holds no response with advantages (see --log-samples).</p>"
    levels = range(1, LEVELS + 1)
    switch = '<label><input type="radio" name="by" value="a" checked> advantage</label>'
    if any(row.get("values") for row in rows):
        switch += '<label><input type="radio" name="by" value="v"> value</label>'
    switch += '<label><input type="radio" name="by" value=""> plain</label>'
    marked = any(first_wrong_token(row) is not None for row in rows)
    note = ' <i style="outline: 2px solid #d33">&nbsp;</i> first wrong token' if marked else ""
    return f"""<div id="legend">Colour by {switch}
<span class="key of-a">A: −{scale:.2f} {swatches("n", reversed(levels))} 0
{swatches("p", levels)} +{scale:.2f}</span>
<span class="key of-v">V: 0 {swatches("v", levels)} 1</span>{note}</div>
<p>A token's colour is its advantage (whitened, if the run does that) or V of the state before it;
its tooltip has the numbers. Shown are up to {EACH} right and {EACH} wrong responses to one problem,
early, half way and late in the run.</p>
"""


def swatches(colour: str, levels: Iterable[int]) -> str:
    """Empty boxes in shades of a colour: p (A above 0), n (below) or v (V)."""
    return "".join(f'<i class="{colour}{level}">&nbsp;</i>' for level in levels)

"""Tasks of lm-eval with their data in files, so that nothing is fetched, and what a model itself says of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from kvquant_evals.model import default_text

BODIES = {
    "local_choice": """
        output_type: multiple_choice
        doc_to_text: "{{text}}"
        doc_to_choice: "{{choices}}"
        doc_to_target: label
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
    """,
    "local_last": """
        output_type: loglikelihood
        doc_to_text: "{{text}}"
        doc_to_target: "{{choices[label]}}"
        target_delimiter: ""
        metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
    """,
    "local_words": """
        output_type: generate_until
        doc_to_text: "{{text}}"
        doc_to_target: "{{choices[label]}}"
        generation_kwargs: {until: ["zzz"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
    "local_pages": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
    """,
}


def documents(count: int, length: int) -> list[dict]:
    """Stretches of text with four choices: what follows it, what follows another, and two of one token each.

    lm-eval moves blanks from the end of a text to its continuation, and so there are none.
    """
    text = default_text()[20_000:]
    firsts = [(length + 100) * i for i in range(count)]
    others = [text[firsts[-1] + 2000 + first :][:20] for first in firsts]
    choices = [
        [f" {text[first + length :][:20]}", f" {other}", " a", " b"]
        for first, other in zip(firsts, others, strict=True)
    ]
    return [
        {"text": text[first:][:length].strip(), "choices": own, "label": i % 2}
        for i, (first, own) in enumerate(zip(firsts, choices, strict=True))
    ]


def likelihood(subject, tokens: list[int], scored: int) -> tuple[float, bool]:
    """Of the last tokens by the model alone, in one pass without a cache; and whether they are the most likely ones."""
    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = subject.model(ids[:, :-1], use_cache=False).logits[0, -scored:].double()
    targets = ids[0, -scored:]
    total = logits.log_softmax(-1).gather(1, targets[:, None]).sum().item()
    return total, torch.equal(logits.argmax(-1), targets)


def write(folder: Path, documents: list[dict]) -> str:
    """Describes a task of each kind in `folder`, and one without its data. documents: text, choices and label."""
    data = folder / "data.json"
    data.write_text("\n".join(json.dumps(document) for document in documents))
    for name, body in BODIES.items():
        _describe(folder, name, data, [line.strip() for line in body.strip().split("\n")])
    _describe(folder, "local_missing", Path("/nowhere/at/all.json"), ["output_type: loglikelihood"])
    (folder / "group.yaml").write_text("group: local_group\ntask: [local_choice, local_last]\n")
    return str(folder)


def _describe(folder: Path, name: str, data: Path, lines: list[str]) -> None:
    options = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
    lines += [f"task: {name}", "dataset_path: json", "test_split: test", f"dataset_kwargs: {json.dumps(options)}"]
    (folder / f"{name}.yaml").write_text("\n".join(lines))

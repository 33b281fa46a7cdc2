"""Odd files: configurations, weights, runs and scripts that the odd commands name."""

from __future__ import annotations

import os
from pathlib import Path


def make_files(directory: Path) -> None:
    """Make the files that the commands below name."""
    texts = {
        "empty.yaml": "",
        "comments.yaml": "# nothing\n",
        "braces.yaml": "{}\n",
        "null.yaml": "null\n",
        "list.yaml": "- a\n- b\n",
        "word.yaml": "digits\n",
        "number.yaml": "3\n",
        "tabs.yaml": "train:\n\tepochs: 3\n",
        "open.yaml": "train: {epochs: 3\n",
        "quote.yaml": "name: 'x\n",
        "colon.yaml": "train: epochs: 3\n",
        "tag.yaml": "name: !!python/object/apply:os.system ['touch ran']\n",
        "twice.yaml": "seed: 1\nseed: 2\n",
        "unknown.yaml": "optimiser: {lr: 1}\n",
        "flat.yaml": "lr: 0.1\n",
        "section.yaml": "train: 3\n",
        "listed.yaml": "train: [epochs, 3]\n",
        "two.yaml": "seed: 1\n---\nseed: 2\n",
        "alias.yaml": "seed: *nobody\n",
        "self.yaml": "model: {options: &a {b: *a}}\n",
        "base.yaml": "base: base.yaml\n",
        "bases.yaml": "base: missing.yaml\n",
        "baselist.yaml": "base: [digits]\n",
        "basenull.yaml": "base: null\n",
        "key.yaml": "? [a, b]\n: 3\n",
        "keynull.yaml": "null: 3\n",
        "keynumber.yaml": "3: 3\n",
        "dots.yaml": "name: ../../x\n",
        "nul.yaml": 'name: "a\\0b"\n',
        "deep.yaml": "a: " + "[" * 20_000,
        "bomb.yaml": "".join(
            f"k{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10) if i else '1'}]\n" for i in range(12)
        ),
        "plugins.yaml": "plugins: [missing.py]\n",
        "pluginsdir.yaml": "plugins: [directory]\n",
        "pluginsmap.yaml": "plugins: {a: b}\n",
        "deepoption.yaml": f"model: {{options: {{a: {'[' * 40}{']' * 40}}}}}\n",
        "script.py": "print(1)\n",
        "evaluated.yaml": "MODEL:\n  ARCH: resnet18\nTEST:\n  DATASET: nowhere\n",
        "broken.pth.tar": "PK\x03\x04 no archive",
        "broken.py": "models = {\n",
        "nothing.py": "x = 1\n",
        "needs.py": "import a_package_that_is_absent\nmodels = {}\n",
        "cfg.yaml": "MODEL: {ARCH: resnet18}\n",
        "cfgodd.yaml": "MODEL: {ARCHITECTURE: resnet18}\n",
        "file": "text\n",
        "empty.safetensors": "",
        "text.safetensors": "text\n",
        "empty.pt": "",
    }
    for name, text in texts.items():
        (directory / name).write_text(text)
    (directory / "binary.yaml").write_bytes(bytes(range(256)))
    (directory / "latin.yaml").write_bytes("name: Zürich\n".encode("latin-1"))
    (directory / "utf16.yaml").write_bytes("seed: 1\n".encode("utf-16"))
    (directory / "large.yaml").write_text("# " + "x" * 100_000 + "\nseed: 1\n")
    (directory / "binary.pt").write_bytes(bytes(range(256)))
    (directory / "directory").mkdir()
    (directory / "directory" / "file").write_text("mine\n")
    (directory / "emptydir").mkdir()
    (directory / "link.yaml").symlink_to("link.yaml")
    os.mkfifo(directory / "pipe.yaml")
    run = directory / "run"
    run.mkdir()
    (run / "config.yaml").write_text("out: run\n")
    odd = directory / "oddrun"
    odd.mkdir()
    (odd / "config.yaml").write_text("optimiser: 3\n")
    (odd / "metrics.jsonl").write_text("no JSON\n")
    (odd / "trace.json").write_text('{"traceEvents": 3}\n')
    (directory / "trace.json").write_text("[" * 3000)

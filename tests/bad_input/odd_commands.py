"""Odd command lines, in a directory with odd files. Each is refused before anything starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args, get_origin

from shoal.config.fields import Setting, all_settings

HUGE = "1" + "0" * 21
LONG = "x" * 5000
CONTROL = "a\x1b[2Jb"

Command = tuple[str, ...]


FILES = [
    *("empty", "comments", "braces", "null", "list", "word", "number", "tabs", "open", "quote"),
    *("colon", "tag", "twice", "unknown", "flat", "section", "listed", "two", "alias", "self"),
    *("base", "bases", "baselist", "key", "keynull", "keynumber", "dots", "nul", "deep", "bomb"),
    *("plugins", "pluginsdir", "pluginsmap", "deepoption", "binary", "latin", "utf16", "large"),
    *("link", "pipe", "missing"),
]


def commands() -> Iterator[Command]:
    """Yield all commands of the table."""
    yield from _of_files()
    yield from _of_settings()
    yield from _of_strategies()
    yield from _of_flags()
    yield from _of_runs()
    yield from _of_tools()
    yield from _of_hosts_and_clusters()
    yield from _of_evaluations()


def _of_files() -> Iterator[Command]:
    for name in FILES:
        yield "train", f"{name}.yaml"
    for name in ("empty", "deep", "pipe", "binary", "missing", "tag", "plugins"):
        for verb in ("config", "verify", "plan-tensor"):
            if (verb, name) != ("config", "plugins"):
                yield verb, f"{name}.yaml"
    for source in ("directory", "file", "/dev/null", "/dev/zero", "", " ", LONG, "a\nb", "~", "."):
        yield "train", source
    yield "train", "digits", "digits"
    yield ("train",)
    for file in ("missing.py", "directory", "broken.py", "nothing.py"):
        yield "train", "digits", "--plugin", file
    for file in ("", LONG, "pipe.yaml", "binary.pt"):
        yield "train", "digits", "--plugin", file
    for cfg in ("missing.yaml", "cfgodd.yaml", "empty.yaml", "directory", "deep.yaml", "list.yaml"):
        yield "train", "--cfg", cfg
    for pairs in (
        ("MODEL.ARCH",),
        ("MODEL.ARCHI", "x"),
        ("TRAIN.BATCH_SIZE", "x"),
        ("TRAIN.BATCH_SIZE", "-1"),
        ("TRAIN.BATCH_SIZE", HUGE),
        ("OPTIM.BASE_LR", "nan"),
        ("OPTIM.LR_POLICY", "exp"),
        ("OPTIM.STEPS", "(3,1)"),
        ("MODEL.PRETRAINED", "True"),
        ("TRAIN.DATASET", "missing"),
        ("MODEL.WEIGHTS", "missing.pth"),
        ("MODEL.NUM_CLASSES", "0"),
        ("RNG_SEED", "-1"),
        ("OUT_DIR", "/dev/null"),
        ("model.arch", "resnet18"),
    ):
        yield "train", "--cfg", "cfg.yaml", *pairs


def _odd_values(setting: Setting) -> Iterator[str]:
    """Yield texts that are no value of a setting."""
    annotation = setting.annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
    is_optional = type(None) in get_args(annotation)
    if is_optional:
        annotation, *_ = kinds  # a number comes before the words that may stand in its place
    yield "{a: b}" if not setting.is_open else "[1]"
    if setting.is_open:
        yield from ("x", "3", "[a]", "{1a: 3}", "{a b: 3}")
        return
    if annotation is bool:
        yield from ("yes", "1", "''", "[true]", "nan", "none", CONTROL)
    elif annotation is int:
        yield from ("x", "1.5", "nan", ".inf", "-1", HUGE, "[1]", "''", "true", "1e400", "0x10")
        yield from () if is_optional else ("none",)
    elif annotation is float:
        yield from ("x", ".nan", ".inf", "-1", "[0.1]", "''", "true", "1e400", "1,5")
        yield from () if is_optional else ("none",)
    elif get_origin(annotation) is tuple:
        if setting.name != "plugins":
            yield from ("x", "[x]", "[1.5]", "[[1]]", "[-1]", f"[{HUGE}]")
    elif get_args(annotation):
        yield from ("x", "''", "none", "[a]", LONG)
    else:
        yield from ("[a]", "[", "'a", "{a", "[!!str a]")


def _of_settings() -> Iterator[Command]:
    for setting in all_settings().values():
        for value in dict.fromkeys(_odd_values(setting)):
            yield "train", "digits", f"--{setting.name}={value}"
    for name in ("", "x" * 100, "train", "train.", ".epochs", "train.epoch", "model.options", "é"):
        yield "train", "digits", f"--{name}", "3"
    for name in ("../../x", "/x", "", " ", LONG, CONTROL, "a/../../b", "n" * 300, "\udcff/.."):
        yield "train", "digits", "--name", name
    for out in ("/dev/null", "/dev/null/x", "file", "file/x", LONG, "", CONTROL, "directory"):
        yield "train", "digits", "--out", out
    yield "train", "digits", "--out", "link.yaml"
    yield "train", "digits", "--out", "a/" * 2000
    yield "train", "digits", "--seed", str(2**64)
    yield "train", "digits", "--seed"
    yield "train", "digits", "seed=3"
    for name in ("", "timm:", "timm:../x", LONG, CONTROL, "../x", "é", "a b"):
        yield "train", "digits", "--model.name", name
    for name in ("nonsense", "", LONG, CONTROL, "../x", "Digits"):
        yield "train", "digits", "--data.name", name
    for name in ("nonsense", "", "sgd", "Optimizer", "lr_scheduler", "__class__", LONG, CONTROL):
        yield "train", "digits", "--optimizer.name", name
    for weights in ("missing.pt", "directory", "", LONG, "/dev/null", "pipe.yaml"):
        yield "train", "digits", "--model.weights", weights
    for path in ("missing", "file", "", LONG):
        yield "train", "digits", "--data.name=imagefolder", "--data.path", path
        yield "train", "digits", "--data.name=cifar10", "--data.path", path
    yield "train", "digits", "--data.name=imagefolder", "--data.path=emptydir"
    for window in ("0", "x", "3@", "@3", "-1", "3@-1", "101", HUGE, "3@20@4", ""):
        yield "train", "digits", "--log.trace", window
    yield "train", "digits", "--optimizer.options.lr", "3"


STRATEGIES = [
    *("", " ", ",", "nonsense", "ddp,ddp", "ddp,zero3", "ddp=3", "zero1=2", "tensor=", "tensor=x"),
    *("tensor=0", "tensor=-1", f"tensor={HUGE}", "tensor=1.5", "tensor=3", "pipeline=0"),
    *("pipeline=-2", f"pipeline={HUGE}", "pipeline=2,schedule=x", "pipeline=2,microbatches=-1"),
    *("pipeline=2,balance=x", "pipeline=2,cuts=a/b/c", "pipeline=2,stages=-1", "server=0"),
    *("server=-1", "server=1000000", f"server={HUGE}", "server=x", "server=1,replicas=0"),
    *("server=1,replicas=1000000", "server=1,staleness=-1", "server=1,staleness=x"),
    *("server=1,lease_s=nan", "server=1,lease_s=0", "server=1,part_mb=-1", "server=1,encrypt=x"),
    *("server=1,compress=x", "ddp,compress=topk=2", "ddp,compress=topk=nan", "ddp,bucket_mb=0"),
    *("ddp,bucket_mb=nan", "ddp,allreduce=x", "ddp,unused=3", "ddp,nonsense=3", "local=0"),
    *("local=-1", "local=x", f"local={HUGE}", "diloco=2,outer_lr=0", "diloco=2,outer_lr=nan"),
    *("diloco=2,outer_momentum=1", "recompute=0", "recompute=-1", "recompute=1,budget_mb=9"),
    *("recompute=nan", "zero3,hybrid=-1", "zero3,hybrid=3", "zero3,offload=maybe"),
    *("missing_module:Class", "os.path:a b", ":", "a:", ":B", "ddp;zero1", "é"),
    *("=", "==", "ddp,", ",ddp", "ddp,,zero1", LONG, CONTROL, "single", f"recompute={HUGE}"),
    *("recompute=.nan", "server=1,part_mb=.inf", f"server=1,staleness={HUGE}"),
    *("tensor=2,whole=", "tensor=2,sequence=3"),
]


def _of_strategies() -> Iterator[Command]:
    for line in STRATEGIES:
        if line not in ("tensor=2,whole=",):
            yield "train", "digits", "-n", "2", "--strategy", line


NUMBERS = ("0", "-1", "x", "1.5", "", "nan", HUGE, "1e3", "１０" * 20, "99999", "0x2")


def _of_flags() -> Iterator[Command]:
    for number in NUMBERS:
        yield "train", "digits", "-n", number
        yield "launch", "-n", number, "script.py"
        yield "eval", "run", "-n", number
        yield "verify", "digits", "-n", number
    for number in ("-1", "x", HUGE, ""):
        yield "train", "digits", "-n", "2", "--restarts", number
    yield "train", "digits", "--restarts", "3"
    for window in ("0", "x", "3@", "-1", HUGE, ""):
        yield "train", "digits", f"--trace={window}"
        yield "launch", "-n", "1", f"--trace={window}", "script.py"
    yield "launch", "-n", "2", "--allreduce", "ring", "script.py"
    yield "launch", "-n", "2", "missing.py"
    yield "launch", "-n", "2", "directory"
    yield "launch", "-n", "2", "pipe.yaml"
    yield "launch", "-n", "2", LONG
    yield "launch", "-n", "2", ""
    yield "launch", "script.py"
    yield "launch", "-n", "2", "--strategy", "nonsense", "script.py"
    yield "launch", "-n", "2", "--strategy", "tensor=3", "script.py"
    for number in ("0", "-1", "x", HUGE):
        yield "launch", "-n", "2", "--accumulate", number, "script.py"
    yield "launch", "-n", "2", "--show-output", "none", "script.py"
    yield "launch", "-n", "2", "--trace", "--trace-to", "file", "script.py"
    yield ("trian", "digits")
    yield ("",)
    yield (LONG,)
    yield (CONTROL,)
    yield ("--nonsense",)
    yield "train", "--nonsense"
    yield "train", "digits", "-x"
    yield "train", "digits", "--record"


def _of_runs() -> Iterator[Command]:
    places = ("missing", "file", "emptydir", "directory", "oddrun", "", LONG, "/dev/null", "a\nb")
    for place in places:
        for verb in ("eval", "export", "replay"):
            yield verb, place
        yield "scale", place, "2"
        yield "servers", place
        yield "plot", place
        yield "trace", place
    for verb in ("eval", "export", "replay", "servers", "trace", "plot"):
        yield (verb,)
        yield verb, "run", "--nonsense"
    yield "scale", "run"
    for number in NUMBERS:
        yield "scale", "run", number
    yield "eval", "run", "--checkpoint", "newest"
    yield "export", "run", "-o", "model.pt"
    yield "export", "run", "-o", "missing/model.safetensors"
    yield "export", "run", "-o", "file/model.safetensors"
    yield "export", "run", "-o", ""
    yield "export", "run", "-o", f"{LONG}.safetensors"
    for step in ("-1", "x", "1.5", HUGE):
        yield "replay", "run", "--step", step
    yield "servers", "run", "delete"
    yield "servers", "run", "remove"
    yield "servers", "run", "list", "3"
    for number in ("0", "-1", "x", HUGE):
        yield "servers", "run", "add", number
    yield "servers", "run", "remove", "-1"
    yield "servers", "run", "remove", HUGE
    for output in ("x.gif", "x", "", "directory", f"{LONG}.png", "file/x.png"):
        yield "plot", "oddrun", "-o", output
    for output in ("directory", f"{LONG}.json", "file/x.json", "/proc/x.json"):
        yield "calibrate", "-o", output
    yield "trace", "trace.json"
    yield "trace", "pipe.yaml"
    yield "trace", "binary.pt"


def _of_tools() -> Iterator[Command]:
    yield ("schedule",)
    for name in ("nonsense", "", "1F1B", LONG):
        yield "schedule", name
    for number in ("0", "-1", "x", "1.5", HUGE, "100000"):
        yield "schedule", "1f1b", "-p", number
        yield "schedule", "1f1b", "-m", number
        yield "schedule", "interleaved", "-v", number
    for number in ("0", "-1", "x", "1.5", HUGE):
        yield "verify", "digits", "--steps", number
        yield "plan-tensor", "digits", "-t", number
    for number in ("nan", "-1", "x", "inf", ""):
        yield "verify", "digits", "--tolerance", number
    yield "verify", "digits", "--strategy", "nonsense"
    yield "verify", "digits", "--model.name", "../x"
    for file in ("missing.safetensors", "directory", "", LONG, "/dev/null", "pipe.yaml"):
        yield "train", "digits", "--weights", file
    yield "train", "digits", "--weights"
    yield "doctor", "--nonsense"
    yield "doctor", "now"
    yield "config", "nonsense"
    yield "config", "digits", "all"


def _of_hosts_and_clusters() -> Iterator[Command]:
    for hosts in (
        "",
        ",",
        "a:0",
        "a:-1",
        "a:x",
        "a:1,a:1",
        f"a:{HUGE}",
        "-oProxyCommand=touch x:1",
    ):
        yield "train", "digits", "--hosts", hosts
    yield "train", "digits", "--hosts", "a:2,b:2", "-n", "3"
    for limit in ("nan", "-1", "1e400", "x", ""):
        yield "train", "digits", "--hang-limit", limit
    for variable in ("=3", "A B=3", "RANK=3", "A=\x01"):
        yield "train", "digits", "--env", variable
    yield "train", "digits", "--slurm", "x"
    yield "train", "digits", "--kubernetes"
    yield "launch", "--hosts", "a:1", "missing.py"
    yield "launch", "--hang-limit", "nan", "script.py"
    yield "launch", "-n", "2", "/dev/zero"
    yield "launch", "-n", "2", "a\nb.py"


def _of_evaluations() -> Iterator[Command]:
    eval_cfg = ("eval", "--cfg", "evaluated.yaml")
    yield eval_cfg
    yield *eval_cfg, "MODEL.WEIGHTS"
    for weights in ("missing", "directory", "broken.pth.tar", "pipe.yaml", LONG):
        yield *eval_cfg, "MODEL.WEIGHTS", weights
    for key, value in (("TEST.BATCH_SIZE", "-3"), ("NOPE.X", "3"), ("TEST.IM_SIZE", "x")):
        yield *eval_cfg, "MODEL.WEIGHTS", "broken.pth.tar", key, value
    for cfg in ("pipe", "deep", "list", "missing"):
        yield "eval", "--cfg", f"{cfg}.yaml", "MODEL.WEIGHTS", "broken.pth.tar"
    yield "verify", "broken.py"
    yield "verify", f"{LONG}.py"
    for file in ("missing.py", "broken.py", "needs.py"):
        yield "plan-tensor", "stdlib_gpt", "--plugin", file
    yield "plan-tensor", "stdlib_gpt", "--model.weights", "missing"
    for name in ("nope", "resnet19", "timm:nope", "timm:resnet19x", "__init__"):
        yield "plan-tensor", "stdlib_gpt", "--model.name", name
        yield "train", "digits", "-n", "2", "--model.name", name


def name_of(command: Command) -> str:
    """Return a short text for the name of a test."""
    words = [word if len(word) < 40 else f"{word[:20]}..." for word in command]
    return json.dumps(" ".join(words)).strip('"')

"""Lines of a script that will be refused are named before training, not after hours of it."""

import torch
from torch import nn
from torch.optim import Optimizer

import shoal
from shoal.testing import world


def save(net: nn.Module, optimizer: Optimizer) -> None:
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, "best.pt")
    net.save_pretrained("out")


LINE, NEXT = (f"test_state_notes.py:{save.__code__.co_firstlineno + n}" for n in (1, 2))


def notes_before_training(strategy: str) -> list[str]:
    notes: list[str] = []
    run = shoal.init(strategy, announce=notes.append)
    net, other = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), nn.Linear(1, 1)
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    for _ in range(2):
        optimizer.zero_grad()
        run.forward_backward(lambda x: net(x).square().mean(), run.share(torch.ones(4, 4)))
        optimizer.step()
    other.state_dict()
    return sorted(note for note in notes if "is refused where" in note)


def test_lines_that_ask_for_what_a_rank_lacks_are_named_once() -> None:
    assert world.run(2, notes_before_training, "ddp")[0] == []
    (of_optimizer,) = world.run(2, notes_before_training, "server=1")[0]
    assert of_optimizer.startswith(f"note: optimizer.state_dict() in {LINE} under server=1 is ref")
    for strategy, where in (
        ("zero3", "each rank holds a shard of 0.weight"),
        ("pipeline=2", "2.weight is in another rank's stage"),
    ):
        of_files, of_net, of_optimizer = world.run(2, notes_before_training, strategy)[0]
        assert of_files.startswith(f"note: net.save_pretrained() in {NEXT} under {strategy} is ref")
        text = (
            f"note: net.state_dict() in {LINE} under {strategy} is refused where net "
            f"is what was prepared: {where}. Use run"
        )
        assert of_net.startswith(text)
        assert of_optimizer.startswith(f"note: optimizer.state_dict() in {LINE} under {strategy}")

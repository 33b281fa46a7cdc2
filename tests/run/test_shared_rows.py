"""Sizes of batches that are shared out without a loader, and of lists of images."""

import torch

from shoal.run.batch_size import BatchSizes


def test_rows_of_a_shared_batch_are_known_also_on_another_device() -> None:
    sizes = BatchSizes([])
    batches = [{"x": torch.arange(rows * 2).view(rows, 2)} for rows in (5, 1, 4)]
    locals_ = [sizes.share(batch, rank=1, ranks=2) for batch in batches]
    assert [len(local["x"]) for local in locals_] == [2, 1, 2]
    found = [sizes.resolve([local], None, 2) for local in locals_]
    assert [(size.rows, size.global_rows, size.is_known) for size in found] == [
        (2, 5, True),
        (0, 1, True),
        (2, 4, True),
    ]
    moved = locals_[0]["x"].clone()
    sizes.track(locals_[0]["x"], moved)
    assert sizes.resolve([moved], None, 2)[:2] == (2, 5)


def test_lists_of_images_are_known_by_their_length() -> None:
    sizes = BatchSizes([])
    images = [torch.zeros(3, size, 5) for size in (4, 6, 7)]
    boxes = [{"boxes": torch.zeros(count, 4)} for count in (1, 0, 2)]
    own_images, own_boxes = sizes.share((images, boxes), rank=0, ranks=2)
    assert [len(own_images), len(own_boxes)] == [2, 2]
    copies = [image.clone() for image in own_images]
    assert sizes.resolve([copies, own_boxes], None, 2)[:2] == (2, 3)
    unknown = BatchSizes([]).resolve([images, boxes], None, 2)
    assert (unknown.rows, unknown.is_known) == (3, False)

import torch

from shoal.data.images import Augmented, Images


def images() -> Images:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(1, 256, (5, 3, 6, 7), dtype=torch.uint8, generator=generator)
    return Images(pixels, torch.arange(5), [1.0, 2.0, 3.0], [2.0, 4.0, 8.0])


def test_pixels_are_normalised_channel_by_channel():
    dataset = images()
    image, label = dataset[2]
    assert label == 2
    assert torch.equal(image[1], (dataset.pixels[2, 1].float() - 2) / 4)


def test_augmentation_is_a_crop_of_the_image_in_a_black_border_flipped_or_not():
    plain = images()
    height, width = plain.pixels.shape[-2:]
    padded = torch.zeros(3, height + 4, width + 4, dtype=torch.uint8)
    padded[:, 2:-2, 2:-2] = plain.pixels[0]
    crops = [
        padded[:, top : top + height, left : left + width] for top in range(5) for left in range(5)
    ]
    possible = [plain.normalise(view) for crop in crops for view in (crop, crop.flip(-1))]
    seen = set()
    for _ in range(600):
        image, label = Augmented(plain, border=2)[0]
        assert label == 0
        seen.add(
            next(
                number for number, candidate in enumerate(possible) if torch.equal(candidate, image)
            )
        )
    assert len(seen) == 50


def test_augmentation_follows_from_the_default_generator_alone():
    dataset = Augmented(images())
    torch.manual_seed(3)
    first = [dataset[i][0] for i in range(5)]
    torch.manual_seed(3)
    assert all(torch.equal(dataset[i][0], image) for i, image in enumerate(first))

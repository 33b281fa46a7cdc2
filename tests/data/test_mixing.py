import pytest
import torch
from torch.utils.data import Dataset

from shoal.data.mixing import Mixed, cutmix
from shoal.errors import DataError


class Constant(Dataset):
    """Image i is i everywhere, of class i."""

    def __init__(self, shape=(1, 12, 16)):
        self.shape = shape

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full(self.shape, float(index)), index


def draws(mixup_alpha, cutmix_alpha, number=200):
    torch.manual_seed(0)
    dataset = Mixed(Constant(), 4, mixup_alpha, cutmix_alpha)
    return [dataset[i % 4] for i in range(number)]


@pytest.mark.parametrize("alphas", [(0.2, 0), (0, 1.0), (0.8, 1.0), (0.001, 0)])
def test_the_target_says_what_share_of_the_sample_is_of_which_class(alphas):
    for image, target in draws(*alphas):
        assert image.shape == (1, 12, 16)
        assert image.dtype == target.dtype == torch.float32
        assert target.shape == (4,)
        # The classes' images are 0, 1, 2, 3 everywhere, so the mean pixel is the mean class.
        torch.testing.assert_close(image.mean(), target @ torch.arange(4.0))
        torch.testing.assert_close(target.sum(), torch.tensor(1.0))


def test_mixup_blends_and_cutmix_pastes():
    assert all(len(image.unique()) == 1 for image, _ in draws(1.0, 0))
    pasted = [image for image, _ in draws(0, 1.0)]
    assert all(set(image.unique().tolist()) <= {0.0, 1.0, 2.0, 3.0} for image in pasted)
    assert any(len(image.unique()) == 2 for image in pasted)


def test_with_both_alphas_samples_take_one_of_the_two_with_equal_chance():
    whole = [image for image, _ in draws(1.0, 1.0, number=1000)]
    pasted = sum(len(image.unique()) == 2 for image in whole)
    blended = sum(bool((image != image.round()).all()) for image in whole)
    # Three partners in four are another image; the small rest of cutmix's boxes are empty.
    assert 300 < blended < 450
    assert 250 < pasted < 450


def test_every_partner_is_drawn_and_the_share_of_the_first_is_one_half_on_average():
    targets = (
        torch.stack([target for _, target in draws(1.0, 0, number=2000)]).view(-1, 4, 4).mean(0)
    )
    # Of what is mixed in, each of the four classes gives a quarter: 1/2 + 1/8 on the diagonal, 1/8
    # off it.
    torch.testing.assert_close(
        targets, torch.full((4, 4), 0.125) + 0.5 * torch.eye(4), atol=0.05, rtol=0
    )


def test_a_mixed_sample_follows_from_the_default_generator_alone():
    first, second = draws(0.2, 1.0), draws(0.2, 1.0)
    assert all(
        torch.equal(a, b) and torch.equal(s, t)
        for (a, s), (b, t) in zip(first, second, strict=True)
    )


def test_the_share_of_cutmix_is_corrected_to_the_pixels_that_were_pasted():
    torch.manual_seed(0)
    for _ in range(200):
        image, share = cutmix(torch.ones(3, 9, 7), torch.zeros(3, 9, 7), float(torch.rand(())))
        assert share == pytest.approx(float(image.mean()), abs=1e-6)


def test_cutmix_changes_neither_of_its_images():
    first, second = torch.ones(1, 8, 8), torch.zeros(1, 8, 8)
    cutmix(first, second, 0.3)
    assert bool((first == 1).all())
    assert bool((second == 0).all())


def test_cutmix_of_something_else_than_images_is_refused_and_mixup_is_not():
    flat = Constant(shape=(8,))
    assert Mixed(flat, 4, 0.2, 0)[0][0].shape == (8,)
    with pytest.raises(DataError, match=r"the shape \(8,\)\. Set train\.cutmix=0"):
        Mixed(flat, 4, 0, 1.0)[0]

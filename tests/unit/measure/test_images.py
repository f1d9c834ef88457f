"""Feature maps, filters and inputs become pixels that can be read back."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from telemetry.layers.pictures import columns_in, columns_of
from telemetry.measure.images import (
    encode_png,
    feature_map_grid,
    filter_grid,
    input_grid,
    sample_feature_maps,
    sample_filters,
    sample_inputs,
)

MAGENTA = [255, 0, 255]
SIDE = 32  # a map of this side is neither enlarged nor downsampled


def ramp(low: float, high: float) -> Tensor:
    """Return a map of 32 × 32 values in equal steps."""
    return torch.linspace(low, high, SIDE * SIDE, dtype=torch.float64).float().reshape(SIDE, SIDE)


def tile(image: np.ndarray, row: int, column: int, side: int = SIDE) -> np.ndarray:
    """Return one map of a grid, without the gap of one pixel around it."""
    top, left = 1 + row * (side + 1), 1 + column * (side + 1)
    return image[top : top + side, left : left + side]


# --- samples


@pytest.mark.parametrize(
    ("shape", "shown"),
    [
        ((3, 100, 5, 7), lambda output: output[0, :64]),
        ((2, 3, 50), lambda output: output[0, :, None, :]),  # rows of a 1D convolution
        ((2, 3, 5, 6, 7), lambda output: output[0, :, 2]),  # the middle slice of a 3D one
        ((1, 1, 4, 128), lambda output: output[0]),
        ((1, 1, 4, 129), lambda output: output[0, :, :, ::2]),
        ((1, 1, 4, 1000), lambda output: output[0, :, :, ::8]),
    ],
)
def test_maps_are_of_the_first_sample_and_at_most_64_of_128_pixels_a_side(
    shape: tuple[int, ...], shown: Callable[[Tensor], Tensor]
) -> None:
    output = torch.randn(shape, requires_grad=True)
    maps = sample_feature_maps(output)
    assert maps is not None
    assert torch.equal(maps, shown(output))
    assert not maps.requires_grad


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8,
     torch.bool, torch.complex64],
)  # fmt: skip
def test_samples_are_float32_copies_of_every_dtype(dtype: torch.dtype) -> None:
    """The magnitudes of complex numbers count."""
    output = torch.tensor([[[[0.0, 1.0]]]]).to(dtype)
    maps = sample_feature_maps(output * 1j if dtype.is_complex else output)
    assert maps is not None
    assert maps.dtype == torch.float32
    assert maps.tolist() == [[[0.0, 1.0]]]


def test_a_float32_sample_does_not_share_memory() -> None:
    batch = torch.zeros(1, 1, 2, 2)
    samples = [sample_feature_maps(batch), sample_inputs(batch), sample_filters(batch)]
    batch.fill_(1)
    assert all(sample is not None and not sample.any() for sample in samples)


@pytest.mark.parametrize(
    "output",
    [
        *map(torch.zeros, [(3,), (3, 4), (1, 1, 1, 1, 1, 1), (0, 3, 4, 4), (2, 3, 0, 4)]),
        torch.zeros(1, 1, 4, 4).to_sparse(),
        torch.zeros(1, 1, 4, 4, device="meta"),
    ],
)
def test_tensors_that_are_not_maps_give_no_sample(output: Tensor) -> None:
    assert sample_feature_maps(output) is None
    assert sample_inputs(output) is None
    assert sample_filters(output) is None


def test_sixteen_inputs_that_are_images_are_copied() -> None:
    batch = torch.randn(20, 3, 8, 8)
    images = sample_inputs(batch)
    assert images is not None
    assert torch.equal(images, batch[:16])
    for shape in [(4, 2, 8, 8), (4, 4, 8, 8), (4, 3, 8)]:
        assert sample_inputs(torch.zeros(shape)) is None


@pytest.mark.parametrize("channels", [1, 2, 3, 8])
def test_filters_are_averaged_over_channels_unless_they_are_rgb(channels: int) -> None:
    weight = torch.randn(70, channels, 5, 5)
    filters = sample_filters(weight)
    expected = weight[:64] if channels == 3 else weight[:64].mean(1, keepdim=True)
    assert filters is not None
    assert torch.equal(filters, expected)


# --- grids


def test_each_map_spans_black_to_white_between_its_percentiles() -> None:
    maps = torch.stack([ramp(0, 1), ramp(-700, -500), ramp(5e37, 3e38), ramp(-3e38, 3e38)])
    image = feature_map_grid(maps)
    assert image.dtype == np.uint8
    assert image.shape == (2 * 33 + 1, 2 * 33 + 1, 3)
    low, high = np.percentile(np.linspace(0, 1, SIDE * SIDE), [1, 99])
    expected = np.clip((np.linspace(0, 1, SIDE * SIDE) - low) / (high - low), 0, 1) * 255
    for index, (row, column) in enumerate(itertools.product(range(2), range(2))):
        pixels = tile(image, row, column)
        assert (pixels == pixels[..., :1]).all(), index
        np.testing.assert_allclose(pixels[..., 0].ravel(), expected, atol=0.51)


@pytest.mark.parametrize(("most", "one", "level"), [(0.0, 0.25, 255), (1.0, 0.25, 0)])
def test_a_single_pixel_that_differs_is_visible_and_hides_no_others(
    most: float, one: float, level: int
) -> None:
    maps = ramp(0, 1)[None].clone()
    maps[0, 0, 0] = 1e6
    assert np.ptp(feature_map_grid(maps)[1:, :, 0]) > 240
    maps = torch.full((1, SIDE, SIDE), most)
    assert not feature_map_grid(maps).any()
    maps[0, 3, 4] = one
    image = feature_map_grid(maps)
    assert (image[3, 4] == level).all()
    assert (image == 255 - level).sum() == 3 * (SIDE * SIDE - 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nonfinite_pixels_are_magenta_and_leave_the_others_as_they_are(value: float) -> None:
    clean = ramp(0, 1)[None]
    broken = clean.clone()
    broken[0, 10, 20] = value
    before, after = feature_map_grid(clean), feature_map_grid(broken)
    assert after[10, 20].tolist() == MAGENTA
    elsewhere = (after != MAGENTA).any(axis=2)
    assert elsewhere.sum() == SIDE * SIDE - 1
    assert np.abs(after.astype(int) - before)[elsewhere].max() <= 1


def test_a_map_that_is_half_infinite_shows_the_other_half() -> None:
    maps = ramp(0, 1).repeat(2, 1, 1)
    maps[0, :16] = torch.inf
    maps[1], maps[1, :5] = torch.nan, torch.inf
    image = feature_map_grid(maps)
    half, nothing = tile(image, 0, 0), tile(image, 0, 1)
    assert (half[:16] == MAGENTA).all()
    assert (half[16].max(), half[31].min()) == (13, 242)
    assert (nothing == MAGENTA).all()


def test_a_map_of_7_by_7_is_enlarged_without_blurring() -> None:
    maps = torch.arange(49.0).reshape(1, 7, 7)
    image = feature_map_grid(maps)
    assert image.shape == (35, 35, 3)
    blocks = image.reshape(7, 5, 7, 5, 3)
    assert (blocks == blocks[:, :1, :, :1]).all()


def test_zero_is_the_middle_of_all_filters() -> None:
    filters = torch.zeros(4, 1, SIDE, SIDE)
    filters[0] = ramp(-2, 2)
    filters[1] = 1.0
    image = filter_grid(filters)
    limit = np.percentile(filters.abs().numpy(), 99)
    assert (tile(image, 1, 0) == 128).all()
    assert (tile(image, 0, 1) == round(255 * (1 + limit) / (2 * limit))).all()
    assert tile(image, 0, 0).min() == 0
    assert tile(image, 0, 0).max() == 255


def test_colors_of_filters_and_inputs_are_kept() -> None:
    """A pixel with one nonfinite color is magenta."""
    filters, images = torch.zeros(2, 1, 3, SIDE, SIDE)
    assert np.ptp(filter_grid(filters)) == 0
    filters[0, 0, :16] = 1.0
    filters[0, 2, 16:] = -1.0
    image = filter_grid(filters)
    assert (image[0, 0].tolist(), image[31, 0].tolist()) == ([255, 128, 128], [128, 128, 0])
    images[:, 0, :10] = 1.0
    images[:, 1, :10] = 0.5
    images[0, 1, 2, 3] = torch.nan
    image = input_grid(images)
    assert image[0, 0].tolist() == [255, 128, 0]
    assert (image == MAGENTA).all(-1).nonzero() == ([2], [3])


def test_inputs_share_one_scale() -> None:
    images = torch.stack([ramp(0, 1), ramp(0, 4), ramp(0, 1), ramp(0, 1)])[:, None]
    image = input_grid(images)
    limit = np.percentile(images.numpy(), 99)
    assert tile(image, 0, 0).max() == round(255 / limit)
    assert tile(image, 0, 1).max() == 255


@pytest.mark.parametrize("hole", [False, True])
def test_a_png_holds_the_pixels(hole: bool) -> None:
    maps = torch.randn(5, 9, 11)
    if hole:
        maps[2, 3, 4] = torch.nan
    image = feature_map_grid(maps)
    with Image.open(io.BytesIO(encode_png(image))) as png:
        assert png.format == "PNG"
        assert png.mode == ("RGB" if hole else "L")
        assert np.array_equal(np.asarray(png.convert("RGB")), image)


@given(
    shape=st.tuples(st.integers(2, 64), st.integers(1, 130), st.integers(1, 130)),
    seed=st.integers(0, 100),
)
def test_a_reader_finds_the_columns_that_were_drawn(shape: tuple[int, int, int], seed: int) -> None:
    maps = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    count, height, width = shape
    factor = -(-32 // max(height, width))
    drawn = columns_of(count, 4 if height == 1 else height * factor, width * factor)
    assert columns_in(count, feature_map_grid(maps)[:, :, 0]) == drawn


@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 200)),
    scale=st.sampled_from([0.0, 1e-45, 1e-38, 1.0, 1e38]),
    holes=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 100),
)
def test_any_maps_become_a_picture_with_exactly_their_holes_in_magenta(
    shape: tuple[int, int, int], scale: float, holes: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn((1, *shape), generator=generator) * scale
    output[torch.rand((1, *shape), generator=generator) < holes] = torch.inf
    maps = sample_feature_maps(output)
    assert maps is not None
    image = feature_map_grid(maps)
    _, height, width = maps.shape
    factor = -(-32 // max(height, width))
    area = factor * (4 if height == 1 else factor)
    assert (image == MAGENTA).all(-1).sum() == maps.isinf().sum() * area
    assert max(image.shape) < 1500

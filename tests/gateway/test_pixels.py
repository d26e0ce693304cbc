"""Images and videos as files."""

import io

import av
import numpy as np
import pytest
from PIL import Image

from gateway.pixels import VideoEncoder, encode_image, read_image, read_mask
from streamrt.errors import BadRequest
from tests.gateway.pictures import claimed, picture, pixels

LIMIT = 1 << 16


def ramp(count, width, height):
    return np.broadcast_to((np.arange(count, dtype=np.uint8) * 5)[:, None, None, None], (count, height, width, 3))


def test_png_is_exact():
    image = np.random.default_rng(0).integers(0, 256, (33, 65, 3), np.uint8)
    assert (pixels(encode_image(image, "png")) == image).all()


def test_compression_makes_jpeg_and_webp_smaller():
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    for image_format in ("jpeg", "webp"):
        assert len(encode_image(image, image_format, 10)) < len(encode_image(image, image_format, 100)) / 2


@pytest.mark.parametrize("data", [b"", b"GIF89a", picture()[:60], picture()[:-40], claimed(20_000, 20_000), claimed(0, 0)], ids=range(6))
def test_a_broken_image_is_the_callers_fault(data):
    with pytest.raises(BadRequest) as refused:
        read_image(data, max_pixels=LIMIT, param="image")
    assert refused.value.param == "image"


def test_size_is_looked_at_before_the_pixels():
    with pytest.raises(BadRequest, match="got 6000x6000, expected at most 65536 pixels"):
        read_image(claimed(6000, 6000), max_pixels=LIMIT, param="image")


def test_a_mask_is_white_where_it_is_repainted():
    alpha = Image.new("RGBA", (4, 2), (255, 255, 255, 255))
    alpha.putpixel((1, 0), (255, 255, 255, 0))
    file = io.BytesIO()
    alpha.save(file, "PNG")
    for data in (file.getvalue(), encode_image(np.array(Image.eval(alpha.getchannel("A"), lambda a: 255 - a).convert("RGB")), "png")):
        mask = Image.open(io.BytesIO(read_mask(data, width=4, height=2, max_pixels=LIMIT, param="mask")))
        assert (mask.mode, np.argwhere(np.array(mask)).tolist()) == ("L", [[0, 1]])


@pytest.mark.parametrize(("width", "height"), [(64, 48), (65, 33), (64, 33)])
def test_a_video_leaves_as_it_is_encoded(width, height):
    encoder = VideoEncoder(width, height, 8.0)
    pieces = [encoder.encode(ramp(40, width, height)[n : n + 8]) for n in range(0, 40, 8)]
    assert all(pieces)  # with the first frame of a second comes the second before it
    data = b"".join([*pieces, encoder.finish()])
    with av.open(io.BytesIO(data)) as container:
        levels = [int(frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]
        assert container.duration == 5_000_000
    assert len(levels) == 40
    assert max(abs(level - 5 * n) for n, level in enumerate(levels)) < 4


@pytest.mark.parametrize("has_come", [True, False])
def test_a_video_has_its_sound(has_come):
    encoder = VideoEncoder(64, 48, 24.0, 16_000)
    pieces = [encoder.encode(ramp(48, 64, 48))]
    pieces += [encoder.add_sound(np.sin(np.arange(32_000, dtype=np.float32))) if has_come else b"", encoder.finish()]
    with av.open(io.BytesIO(b"".join(pieces))) as container:
        assert sum(1 for _ in container.decode(video=0)) == 48
        assert container.duration == pytest.approx(2_000_000, abs=100_000)
    with av.open(io.BytesIO(b"".join(pieces))) as container:
        samples = sum(frame.samples for frame in container.decode(audio=0))
    assert samples == pytest.approx(32_000 * has_come, abs=3000)


def test_the_sound_of_a_video_is_stereo_and_mono_is_heard_on_both_sides():
    time_s = np.arange(16_000, dtype=np.float32) / 16_000
    left, right = np.sin(2 * np.pi * 440 * time_s), np.sin(2 * np.pi * 660 * time_s)

    def heard(sound):
        encoder = VideoEncoder(64, 48, 24.0, 16_000)
        pieces = [encoder.encode(ramp(24, 64, 48)), encoder.add_sound(0.5 * sound), encoder.finish()]
        with av.open(io.BytesIO(b"".join(pieces))) as container:
            planes = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        return [int(np.argmax(np.abs(np.fft.rfft(plane[:16_000])))) for plane in planes]

    assert heard(np.stack([left, right])) == [440, 660]
    assert heard(left) == [440, 440]

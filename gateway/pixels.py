"""Images and videos: pixels in, files out; any uploaded image in, checked. Off the loop.

Knows numpy, and Pillow and av (the [media] extra) lazily. Knows nothing of HTTP or requests.

Rules
- What an upload says of itself is looked at before it is decoded: a file of a few bytes can claim to be gigabytes of pixels.
- A video leaves as it is encoded: a fragmented mp4 has its header in its first piece, and no piece is ever written again.

Shapes: H height, W width, T frames; RGB uint8.
"""

from __future__ import annotations

import io
import struct
import zlib
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from gateway.media import Tail, import_av
from streamrt.errors import BadRequest, ConfigError

IMAGE_TYPES = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
MAX_PIXELS = 4096 * 4096  # of an upload, where the stage names no limit
READABLE = ("PNG", "JPEG", "WEBP")
ORIENTATION = 0x0112  # of EXIF
# What Pillow's decoders raise when they stumble over a broken file.
BROKEN = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError, struct.error, zlib.error)
VIDEO_TYPE = "video/mp4"
X264 = {"preset": "veryfast", "tune": "zerolatency", "crf": "18"}  # zerolatency: a frame that goes in comes out
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
ENCODER_THREADS = 2
AAC_BITS_PER_S = 128_000


def encode_image(pixels: np.ndarray, image_format: str, compression: int = 100) -> bytes:
    """(H, W, 3) as a file. `compression` is OpenAI's word for the quality of jpeg and webp, 0 to 100."""
    image = _pillow().fromarray(pixels)
    if image_format == "png":
        return _png(image)
    file = io.BytesIO()
    image.save(file, image_format.upper(), quality=compression)
    return file.getvalue()


class Upload(NamedTuple):
    """An image that can be read: the file that a stage shall see, and its size."""

    file: bytes
    width: int
    height: int


def read_image(data: bytes, *, max_pixels: int, param: str) -> Upload:
    """Check an upload by decoding it; what its EXIF data says of its orientation is applied. Raises BadRequest."""
    image, is_turned = _open(data, max_pixels, param)
    return Upload(_png(image) if is_turned else data, image.width, image.height)


def read_mask(data: bytes, *, width: int, height: int, max_pixels: int, param: str) -> bytes:
    """A mask of an image of that size as a grey PNG in which white is repainted.

    A mask with an alpha channel means what OpenAI means: transparent is repainted. One without means it already: white is.
    """
    from PIL import ImageOps

    image, _ = _open(data, max_pixels, param)
    if image.size != (width, height):
        raise BadRequest(f"{param}: got {image.width}x{image.height}, expected the size of the image, {width}x{height}", param=param)
    has_alpha = "A" in image.getbands() or "transparency" in image.info
    return _png(ImageOps.invert(image.convert("RGBA").getchannel("A")) if has_alpha else image.convert("L"))


def _open(data: bytes, max_pixels: int, param: str) -> tuple[Any, bool]:
    """The image, decoded and upright, and whether it had to be turned. Raises BadRequest."""
    Image = _pillow()
    from PIL import ImageOps

    try:
        image = Image.open(io.BytesIO(data), formats=READABLE)
        width, height = image.size
        if width * height <= max_pixels:
            image.load()
            is_turned = image.getexif().get(ORIENTATION, 1) != 1
            return ImageOps.exif_transpose(image), is_turned
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise BadRequest(f"{param}: this is not an image that can be read ({error})", hint="send png, jpeg or webp", param=param) from None
    raise BadRequest(f"{param}: got {width}x{height}, expected at most {max_pixels} pixels", param=param)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)  # the fastest
    return file.getvalue()


class VideoEncoder:
    """One fragmented mp4 being written: H.264, and AAC where there is sound. Used by one caller at a time."""

    def __init__(self, width: int, height: int, fps: float, audio_hz: int = 0) -> None:
        """`audio_hz`: 0 = no sound. With it, pictures are held back (encoded, at most 10 s of them) until the sound to them has come."""
        self._av = import_av()
        self._out = Tail()
        self._container = self._av.open(self._out, "w", format="mp4", options=FRAGMENTED)
        rate = Fraction(fps).limit_denominator(1001)
        self._video = self._container.add_stream("libx264", rate=rate, options=X264)
        self._video.width, self._video.height = width, height
        # 4:2:0 is what every player shows, but it has no half pixels.
        self._video.pix_fmt = "yuv444p" if width % 2 or height % 2 else "yuv420p"
        self._video.gop_size = max(1, round(fps))  # one fragment a second
        self._video.codec_context.thread_count = ENCODER_THREADS
        self._video.codec_context.time_base = 1 / rate
        self._audio = self._container.add_stream("aac", rate=audio_hz, layout="stereo") if audio_hz else None
        if self._audio is not None:
            self._audio.bit_rate = AAC_BITS_PER_S
        self._audio_hz = audio_hz
        self._frames = self._samples = 0

    def encode(self, frames: np.ndarray) -> bytes:
        """(T, H, W, 3) -> what of the file is ready by now; may be nothing yet."""
        for pixels in frames:
            frame = self._av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts = self._frames
            frame.time_base = self._video.codec_context.time_base
            self._frames += 1
            self._container.mux(self._video.encode(frame))
        return self._out.take()

    def add_sound(self, samples: np.ndarray) -> bytes:
        """(samples,) or (2, samples) float32 -> what of the file is ready by now. Mono is heard on both sides."""
        if self._audio is not None and samples.size:
            planes = np.ascontiguousarray(np.broadcast_to(np.clip(samples, -1.0, 1.0), (2, samples.shape[-1])), np.float32)
            frame = self._av.AudioFrame.from_ndarray(planes, format="fltp", layout="stereo")
            frame.sample_rate, frame.time_base, frame.pts = self._audio_hz, Fraction(1, self._audio_hz), self._samples
            self._samples += samples.shape[-1]
            self._container.mux(self._audio.encode(frame))
        return self._out.take()

    def finish(self) -> bytes:
        """The rest of the file."""
        self._container.mux(self._video.encode(None))
        if self._audio is not None and self._samples:
            self._container.mux(self._audio.encode(None))
        self._container.close()
        return self._out.take()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("images need Pillow, which is not installed", hint="pip install 'streamrt[media]'") from None
    return Image

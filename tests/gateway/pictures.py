"""Encoded images for uploads, and the pixels of what came back."""

import io
import zlib

import numpy as np
from PIL import Image


def picture(width=32, height=16, mode="RGB", colour=(10, 20, 30), image_format="PNG", **more):
    """An image file of one colour."""
    file = io.BytesIO()
    Image.new(mode, (width, height), colour).save(file, image_format, **more)
    return file.getvalue()


def pixels(data):
    """(H, W, 3) of an image file."""
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def claimed(width, height):
    """A PNG of a few bytes that says it is this big."""
    data = bytearray(picture(8, 8))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)

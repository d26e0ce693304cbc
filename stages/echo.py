"""The smallest stage: says what it is told, chunk by chunk. Copy it to begin your own."""

from __future__ import annotations

from collections.abc import AsyncIterator

from streamrt import Chunk, Request, Stage, text_chunk


class Echo(Stage):
    """Text in, the same text out, as it arrives."""

    takes = {"text"}
    gives = {"text": "text"}
    tasks = ("respond",)

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if chunk.text:
                yield text_chunk(chunk.text)

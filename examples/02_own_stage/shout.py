"""A stage of your own: what comes in leaves in capitals, word by word, as it arrives."""

from collections.abc import AsyncIterator

import msgspec

from streamrt import Chunk, Request, Stage, text_chunk


class Shout(Stage):
    class Args(msgspec.Struct, forbid_unknown_fields=True):
        mark: str = "!"  # put at the end

    takes = {"text"}
    gives = {"text": "text"}

    async def process(self, request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            yield text_chunk(chunk.text.upper())
        yield text_chunk(self.args.mark)

"""What a stage's author and an application need; the rest of the package is how it is done."""

from streamrt.api import AsyncPipeline, Pipeline, Result
from streamrt.client import Call, Client
from streamrt.engine import Engine, EngineStage, Output
from streamrt.errors import (
    AlreadyRunning,
    BadRequest,
    Cancelled,
    ConfigError,
    Expired,
    MissingWeights,
    NotRunning,
    Overloaded,
    StageFailed,
    StreamrtError,
    TooLong,
    Unavailable,
    UnknownModel,
    UnknownTask,
    UnknownVoice,
)
from streamrt.stage import Context, Message, Request, Stage
from transport.chunk import Chunk, Place, audio_chunk, end_chunk, event_chunk, text_chunk

__all__ = [
    "AlreadyRunning",
    "AsyncPipeline",
    "BadRequest",
    "Call",
    "Cancelled",
    "Chunk",
    "Client",
    "ConfigError",
    "Context",
    "Engine",
    "EngineStage",
    "Expired",
    "Message",
    "MissingWeights",
    "NotRunning",
    "Output",
    "Overloaded",
    "Pipeline",
    "Place",
    "Request",
    "Result",
    "Stage",
    "StageFailed",
    "StreamrtError",
    "TooLong",
    "Unavailable",
    "UnknownModel",
    "UnknownTask",
    "UnknownVoice",
    "audio_chunk",
    "end_chunk",
    "event_chunk",
    "text_chunk",
]

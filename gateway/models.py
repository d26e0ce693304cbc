"""Which names of models, voices and parameters are accepted for which task.

A pipeline answers to its own name, to its stages' names, and to the names of the models that those stages run. Clients that were
written for OpenAI ask for its stock models and voices: for speech, transcription, images and videos these stand for whatever the
pipeline has, so that such a client runs unchanged. Any other name is an error, never a silent stand-in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrt.errors import UnknownModel, UnknownTask, UnknownVoice

if TYPE_CHECKING:
    from streamrt import Client

STOCK_MODELS = {
    "speak": ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
    "transcribe": ("whisper-1", "gpt-4o-transcribe", "gpt-4o-mini-transcribe"),
    "image": ("gpt-image-1", "gpt-image-1-mini", "gpt-image-1.5", "gpt-image-2", "dall-e-2", "dall-e-3", "chatgpt-image-latest"),
    "video": ("sora-2", "sora-2-pro"),
}
STOCK_VOICES = frozenset(("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse"))


def check_task(client: Client, task: str) -> None:
    """Raise UnknownTask when the pipeline can not do it."""
    tasks = client.tasks()
    if task not in tasks:
        can = ", ".join(sorted(tasks)) or "nothing"
        raise UnknownTask(f'this pipeline has no stage for "{task}"; it can {can}')


def check_model(client: Client, task: str, model: str) -> str:
    """`model`, or the pipeline's name when it is "". Raises UnknownTask, UnknownModel."""
    check_task(client, task)
    if not model:
        return client.pipeline.name
    if model not in accepted(client, task):
        own = ", ".join(own_names(client, task))
        raise UnknownModel(f'the model "{model}" does not exist here', hint=f"this pipeline has {own}", param="model")
    return model


def accepted(client: Client, task: str) -> set[str]:
    return {*own_names(client, task), *STOCK_MODELS.get(task, ())}


def own_names(client: Client, task: str) -> list[str]:
    """What this pipeline calls that which serves `task`: the pipeline, the stages, their models."""
    names = [client.pipeline.name]
    for stage in client.tasks()[task].stages:
        configured = client.pipeline.stage_named(stage).args.get("model", "")
        for model in (stage, client.describe(stage).get("model", ""), configured):
            names += [str(model), str(model).removeprefix("weights:")]
    return [name for name in dict.fromkeys(names) if name]


def honoured(client: Client, task: str) -> set[str]:
    """Parameters of `task` that its stages say they honour, beyond those that every stage of the task may be given."""
    return {str(name) for stage in client.tasks()[task].stages for name in client.describe(stage).get("parameters", ())}


def speaker(client: Client, task: str) -> str:
    """The stage whose audio the task gives, "" when it gives none."""
    return client.tasks()[task].outputs.get("audio", "").partition(".")[0]


def voices(client: Client, task: str) -> list[str]:
    """The voices of the stage that speaks for `task`; empty when it has no choice or is not ready."""
    stage = speaker(client, task)
    return list(client.describe(stage).get("voices", ())) if stage else []


def default_voice(client: Client, task: str) -> str | None:
    stage = speaker(client, task)
    own = client.describe(stage).get("default_voice") if stage else None
    return client.pipeline.session.voice or own or None


def check_voice(client: Client, task: str, voice: str | None, param: str = "voice") -> str | None:
    """The voice to speak with; None leaves it to the stage. Raises UnknownVoice."""
    known = voices(client, task)
    if voice and (voice in known or (not known and voice not in STOCK_VOICES)):
        return voice
    if not voice or voice in STOCK_VOICES:
        return default_voice(client, task)
    raise UnknownVoice(f'the voice "{voice}" does not exist here', hint=f"this pipeline has {', '.join(known[:60])}", param=param)

"""Hearing and speaking: voice activity (`vad`), speech to text (`asr`), text to speech (`tts`, with `text` for what to say), rates (`resample`)."""

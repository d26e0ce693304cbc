"""The stages that ship with streamrt, by the name that `use` takes.

echo                      text back as it came
speech.vad.silero         audio -> turn events
speech.asr.faster_whisper audio -> text
speech.tts.kokoro         text -> audio
ar.causal_lm              messages -> text, any transformers causal language model
diffusion.pipeline        prompt, images -> image, video or sound, any pipeline of diffusers
testing.*                 scripted stages for tests of protocols and of your own pipelines
"""

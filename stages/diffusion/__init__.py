"""Diffusion: any pipeline of diffusers, many requests at a time, one denoiser call per step.

A stage of task `image`, `video` or `audio` takes `params` (see `params.py`), `text` chunks (a prompt that an earlier stage writes) and
`image` chunks (what is to be edited or animated), and gives what docs/architecture.md says under "Diffusion stages".
"""

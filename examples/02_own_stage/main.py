"""Runs the pipeline beside this file from Python and prints what comes."""

from pathlib import Path

from streamrt import Pipeline

with Pipeline(Path(__file__).parent / "pipeline.toml") as pipeline:
    print(pipeline.generate("hello from a stage of my own").text)

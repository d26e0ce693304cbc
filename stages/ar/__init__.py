"""Autoregressive models: a stepped engine over transformers modules, and the stages on it."""

"""What models need around them: conversion of checkpoints into what loads fast."""

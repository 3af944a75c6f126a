"""The training recipe, installed as `sparse_cache.recipe`.

Where things are: train.py is the run from top to bottom, update.py the arithmetic of a step,
objectives/ the mathematics, rollouts.py the sampling, learner.py the log-probabilities, tasks/ and
verifiers/ what is learned, presets/ and accelerate/ the settings.
"""

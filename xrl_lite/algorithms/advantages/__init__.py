"""Advantage estimators, by what they look at.

outcome         one reward per trajectory, compared with its siblings
temporal        rewards of each token, discounted along the row
token_baseline  a baseline for each position of a group

N trajectories, T tokens of the longest response. All arithmetic is in float64: in float32 a group of equal rewards has
a mean that is off by a rounding error, and dividing that error by a standard deviation of about 0 makes advantages of
up to 0.9 out of nothing.
"""

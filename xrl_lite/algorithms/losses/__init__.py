"""Policy losses by family, in verl's signature.

ratio        clipped or gated probability ratios: vanilla, gspo, sapo, cispo, geo_mean
divergence   trust regions by the distance of the distributions: dppo_tv, dppo_kl
likelihood   weighted log-likelihood: gpg, reinforce, dro, oreal
covariance   tokens chosen by the covariance of advantage and log-prob: clip_cov, kl_cov

Notation: d = log p - log p_old, clamped to +-20; r = exp(d); A the advantage; sg stops the gradient. All losses are
averaged by `loss_agg_mode` unless they say otherwise, and multiplied by the importance weights of rollout correction
where there are any. Values where the mask is 0 never reach loss or gradient, NaN included.
"""

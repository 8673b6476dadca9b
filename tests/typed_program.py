"""What tests/test_types.py shows to type checkers: nothing here is Any but arrays."""

from typing import reveal_type

import numpy as np

import xformer as xf

backend = xf.backends.get("numpy")
text = np.fromfile("README.md", dtype=np.uint8).astype(np.int64)
gpt = xf.GPT(vocab_size=256, n_layers=2, d_model=64, n_heads=4, max_len=64)
params = gpt.init(seed=0, backend=backend.name)
state = xf.optim.adamw_init(params)
loss, cache = gpt.loss(params, text[None, :64], text[None, 1:65])
grads = cache.backward()
params, state = xf.optim.adamw(params, grads, state, lr=3e-3)
y, norm_cache = xf.ops.layer_norm(np.ones((2, 3)), np.ones(3), np.zeros(3))
report = xf.gradcheck(xf.ops.layer_norm, np.ones((2, 3)), np.ones(3), np.zeros(3))
ids = xf.generation.generate(gpt, params, [[1, 2]], max_new_tokens=3)
frozen = xf.tree.freeze(params, "embed.*")
compiled = xf.compile(gpt.loss)
model, weights = xf.pretrained.load("gpt2")
logits, _ = model.forward(weights, text[None, :64])

reveal_type(backend)
reveal_type(gpt)
reveal_type(params)
reveal_type(state)
reveal_type(cache)
reveal_type(grads)
reveal_type(norm_cache)
reveal_type(report)
reveal_type(ids)
reveal_type(frozen)
reveal_type(compiled)
reveal_type(model)
reveal_type(weights)
reveal_type(xf.ops.sdpa)

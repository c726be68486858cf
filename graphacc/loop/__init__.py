"""The user's training loop: what it does is recorded, and runs as compiled programs.

`tape` records the torch functions between a model call and the optimizer's step, `promise` are the tensors that stand
for values not computed yet, `managed` ties parameters and buffers to their device copies, `engine` turns recordings
into programs, and `optimizers` hooks into ``optimizer.step()``.
"""

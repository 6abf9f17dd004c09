"""Where prompts come from: a source gives problem number i of a sequence that does not end.

A place in the data is a number, so that is all a checkpoint keeps of it: the first number that was never
submitted, and those before it that are not trained yet. Every source therefore gives the same problem
for the same number, whenever it is asked, in whatever order, in whatever process.

    rows (JSONL, Parquet, Hugging Face, a Python sequence)
        number -> (pass, place) -> row; each pass has an order of its own, and every row once
    a Python iterator
        gone through from the beginning; what lies before is found by beginning again
    reasoning-gym
        number -> problem, computed
    episodes of an environment
        number -> (difficulty, seed), computed
    a mixture
        number -> (source, number in that source), without drawing: each is itself gone through in order

What a source is of, its `identity`, goes into the checkpoint too: a run resumes only with the data it had.

What a failure does: where data cannot be read, a row has no prompt, or a library is missing, the run
does not begin (ConfigInvalid, naming the row). An iterator that fails in the middle ends the run, saying at
which entry; nothing that was submitted is lost, and resuming goes on there.
"""

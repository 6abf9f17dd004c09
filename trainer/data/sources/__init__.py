"""Where prompts come from: a source returns problem number i of an endless sequence.

A position in the data is a number. A checkpoint therefore keeps only the first number that was
never submitted, and the earlier ones that are not trained yet. In return, every source must return
the same problem for the same number, at any time, in any order and in any process.

    rows (JSONL, Parquet, Hugging Face, a Python sequence)
        number -> (pass, place) -> row; each pass has a new order and contains every row once
    a Python iterator
        read from the beginning; earlier entries are found by starting again
    reasoning-gym
        number -> problem, computed
    episodes of an environment
        number -> (difficulty, seed), computed
    a mixture
        number -> (source, number in that source), not random; each source is read in order

The `identity` of a source goes into the checkpoint too, because a run resumes only with the same
data.

If data cannot be read, a row has no prompt, or a library is missing, the run does not start. It
raises ConfigInvalid, naming the row. If an iterator fails later, the run ends with an error that
names the entry. Submitted tasks are not lost, and a resumed run continues at that entry.
"""

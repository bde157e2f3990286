"""Samples -> a trained drafter. One run, in the order of its files:

run.py         a launch: reads the recipe.py, checks the plan, loads the target, makes or opens
               the samples, and starts the loop; processes.py are those of one launch
plan/          memory, disk and hours of a recipe, from configs alone
data/          prompts and conversations: files, the hub, chat templates, an answering server
samples/       the target's answers as token ids: made, stored (store.py), audited, packed
start.py       what a run begins with: its texts, and a drafter that is new or stored
loop.py        Run: takes steps until the last one, saves and replays on the way
learner.py     Learner: one optimizer step; medusa2.py: one that adapts the target too (lora.py)
states/        the target's states for a batch: computed here, or read from a cache
objective/     losses on the table of row statistics, weights of depths and anchors
journal.py     what a run prints and logs (progress.py, trackers.py); watch.py finds what is wrong
checkpoint.py  the run's folder; disk.py writes files that a kill leaves whole or absent
"""

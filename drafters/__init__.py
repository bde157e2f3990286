"""What drafts, and what it drafts for.

Shape letters, used in every trailing comment of this project:

    B rows          T positions       N nodes of a proposal (node 0 = root)
    A anchors       K depths          M rows of an unroll
    V target vocab  Vd draft vocab    H hidden size
    S cache slots   W width of one extend

Words: a round starts at an **anchor** a, the last position whose features are known; the
**root** x_{a+1} is known too. At **depth** j the drafter predicts x_{a+2+j}, and is compared
with the target's distribution after reading x_{a+1+j}. `batch.py` writes that rule down once.
"""

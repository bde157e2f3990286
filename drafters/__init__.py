"""What drafts, and what it drafts for.

Shape letters, used in every trailing comment of this project:

    B rows          T positions       N nodes of a proposal (node 0 = root)
    A anchors       K depths          M rows of an unroll
    V target vocab  Vd draft vocab    H hidden size
    S cache slots   W width of one extend

Words:

    target    the frozen model, whose next-token distribution is p
    drafter   proposes tokens; its distribution is q
    features  the target's hidden states g_t that a drafter reads, known once x_t has been read; a
              **tap** names a layer of them
    made      whether the target wrote a token itself (not a prompt's, nor a template's)
    round     one proposal and the target's one pass over it
    anchor    position a, the last whose features are known as a round starts
    root      the token x_{a+1}, known too: the target's own last one. Node 0 of a proposal
    depth     at depth j the drafter predicts x_{a+2+j}, and is compared with the target's
              distribution after reading x_{a+1+j}. `batch.py` writes that rule down once
    block     the tokens of one proposal along one path. One path is a chain, several are a tree.
              A block drafter's **slots** are the places that one pass fills: the root, masks
    law       the distribution that a token was drawn from, after the sampler
    served    as a decoder or server runs it: dtype, sampler and cache, not as it is trained
    span      a stretch of target-made tokens: one answer of a conversation
    alpha     chance that a draft is accepted, given that those before it were
    tau       tokens written for each pass of the target
"""

"""The speculative decoder. One round, for B rows at once:

1. extend: the drafter reads the tokens that the last round committed, each with the features that
   the target's pass gave; the last of them is the new anchor.
2. draft: from the root, the target's own last token, the drafter proposes a chain or tree of N
   nodes (root first), and q, the law that each child was drawn from.
3. verify: the target reads all N nodes in one pass, behind its cache of what is committed: p.
4. accept: from p, q and noise, a rule keeps m drafts along one path and draws one token more.
5. commit: root and kept drafts stay in the caches, the m + 1 tokens are written, and the new token,
   which the target has not read yet, is the next root.
6. hand on: the pass's features of root and kept drafts wait for the next extend.

round.py is these steps on the device, accept.py the rules, graphs.py the same as CUDA graphs,
loop.py what the host does about them, text.py what is written and where it stops.
"""

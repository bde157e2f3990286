"""A drafter -> numbers. overlap/ compares p and q row by row, acceptance/ replays and walks texts,
decoder/ decodes them; speed/ times rounds, servers/ asks running servers, certify/ proves that
nothing changed the target's law, report/ writes pages, and evaluate.py does one drafter whole."""

"""The certificate: decoding writes what the target alone would write."""

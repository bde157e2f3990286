"""The target's answers as token ids: made or imported, stored, read again, audited, packed."""

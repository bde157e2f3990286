"""The same numbers from a running server: started, asked, its counters beside replay's."""

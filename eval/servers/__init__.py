"""Running servers: started, asked, and their counters compared with replay."""

"""What a check says: its findings, the lines they stand on, and how they are shown or handed to other programs."""

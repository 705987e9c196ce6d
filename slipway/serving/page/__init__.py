"""The page at `/`: HTML, scripts and texts as files. An extension of the service."""

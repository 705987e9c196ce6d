"""The page at `/`: a start page of plain HTML, scripts and texts as files, which asks the service for everything that it shows."""

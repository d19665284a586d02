"""cell_conductor: builds inside one cell; uses that cell's bus only."""

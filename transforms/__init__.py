"""Your own functions on images, for `precompute.transform`: this folder is theirs, and empty until you write one.

    # transforms/faces.py
    from PIL import Image

    def crop(image: Image.Image) -> tuple[Image.Image, dict[str, int]]:
        left, top, right, bottom = find_face(image)
        return image.crop((left, top, right, bottom)), {"width": right - left}

With `precompute.transform: transforms.faces:crop` it runs once on each decoded, upright image, before that is resized, and
again on every image that the service is asked about. It must be a function of the image alone. See docs/precompute.md.
"""

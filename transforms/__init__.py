"""Your own functions on images, for `precompute.transform`. Empty until you write one.

    # transforms/faces.py
    from PIL import Image

    def crop(image: Image.Image) -> tuple[Image.Image, dict[str, int]]:
        left, top, right, bottom = find_face(image)
        return image.crop((left, top, right, bottom)), {"width": right - left}

With `precompute.transform: transforms.faces:crop`, `precompute` calls it once on each decoded,
upright image before it is resized, and the service calls it on each image of a request. The result
must depend only on the image. See docs/explanation/precompute.md.
"""
